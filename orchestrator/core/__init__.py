"""The controller's decisions: ``machine.step`` folds events into the run state and returns actions."""
