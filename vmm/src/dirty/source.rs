//! Writer to guest memory.

use std::io;

use super::page_set::{Chunk, PageSet};

/// Writer to guest memory that reports its writes.
pub trait DirtySource: Send {
    /// Name of the writer, to follow "what".
    fn name(&self) -> &'static str;

    /// Begins to note pages. What is written after this is noted.
    ///
    /// # Errors
    ///
    /// Fails if it cannot. Nothing is noted then.
    fn start(&mut self) -> io::Result<()>;

    /// Adds the pages that were written since the last call, or since the start, to `pages`.
    ///
    /// # Errors
    ///
    /// Fails if they are not known: none of what was sent can be relied on then.
    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()>;

    /// The pages of `chunk` are copied next. A source that notes a page only once until it is told so notes it again
    /// from here on.
    ///
    /// # Errors
    ///
    /// As [`Self::collect`].
    fn release(&mut self, _chunk: &Chunk) -> io::Result<()> {
        Ok(())
    }

    /// Ends.
    fn stop(&mut self);
}
