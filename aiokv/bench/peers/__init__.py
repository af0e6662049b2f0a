"""Other libraries that move memory between processes, each by a small program on its public interface."""
