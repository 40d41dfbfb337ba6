"""The controller's side of the snapshots in keepers' memory."""
