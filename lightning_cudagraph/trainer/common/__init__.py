"""Shared by captured steps of training, of manual optimization and of evaluation."""
