"""Manual optimization: `GraphedStep` in Lightning and Fabric, and whole steps by the callback."""
