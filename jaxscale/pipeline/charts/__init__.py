"""Charts of schedules, as text, as SVG images and as HTML pages."""
