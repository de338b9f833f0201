"""Text at the edges: tokens to text and back, chat templates, stop strings. The engine in between sees neither."""
