"""One kit for everything that is drawn: markup and pages, axes, SVG charts in a frame, and line charts as HTML."""
