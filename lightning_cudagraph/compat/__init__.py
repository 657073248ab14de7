"""The one home of private names of other packages, and of what is to be known of their versions."""
