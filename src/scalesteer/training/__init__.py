"""The paper's experiments: runs described by frozen configurations, trained, resumed, collected into tables."""
