"""Tools for all drawings: HTML and SVG markup, pages, axes, and charts as SVG images in a frame."""
