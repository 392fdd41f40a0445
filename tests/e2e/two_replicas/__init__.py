"""Tests that share one Ray cluster with two replicas of the demo model, driven over HTTP."""
