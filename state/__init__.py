"""What a session consists of and where it lives: pages, rings, images, checkpoints, coverage, the byte format."""
