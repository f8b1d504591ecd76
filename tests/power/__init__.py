"""Power loss: every state that a disk may be in after one, at every moment of a save, a delete, a prune or an adopt."""
