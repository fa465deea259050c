"""One file per family of estimators: the equation, its description, and the public function."""
