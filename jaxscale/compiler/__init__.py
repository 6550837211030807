"""Ahead-of-time compilation for devices that need not be attached, and reports on a program's memory and transfers."""
