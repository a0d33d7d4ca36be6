"""An analysis as people read it: a page with charts (`page`), and text for terminals (`text`)."""
