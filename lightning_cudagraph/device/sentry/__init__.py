"""The modes that watch each op of a step, refuse what no graph can hold, and mend what can be mended."""
