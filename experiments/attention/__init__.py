"""Error of the attention matrix, and trained feature maps."""
