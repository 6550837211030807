"""Text from a trained model: how tokens are drawn, the compiled programs, windows of a long text, texts that stream."""
