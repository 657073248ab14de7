"""Models of Hugging Face on CUDA."""

from tests.test_hugging_face import *  # noqa: F403
