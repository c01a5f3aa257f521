//! Pages of a running guest's memory that are written, by any writer.
//!
//! Nobody sees all writes: KVM logs those of vCPUs, this process those of its own threads, and each backend that runs
//! queues by itself its own. There is a [`DirtySource`] for each, and a page is dirty if any of them says so.
//!
//! A page's note is taken before the page is copied. So what is written while it is copied is noted again, for the next
//! pass. After the last writer has stopped, one more look finds the rest.

mod backends;
mod kvm;
mod own;
mod page_set;
mod source;
mod still;
#[cfg(test)]
mod tests;

use std::io;

pub use backends::{Backends, FindUsers};
pub use kvm::Vcpus;
pub use own::OwnThreads;
pub use page_set::{CHUNK_PAGES, Chunk, PageSet};
pub use source::DirtySource;
pub use still::Still;

/// All sources of a guest.
pub struct DirtyLog {
    sources: Vec<Box<dyn DirtySource>>,
}

impl DirtyLog {
    /// Begins to note what `sources` write. All pages have to be sent once after this.
    ///
    /// # Errors
    ///
    /// Fails if one cannot: its name and why not. None notes anything then.
    pub fn start(sources: Vec<Box<dyn DirtySource>>) -> io::Result<Self> {
        let mut log = Self { sources: Vec::with_capacity(sources.len()) };
        for mut source in sources {
            // If it fails, those before it are stopped with `log`.
            source.start().map_err(|error| of(&*source, &error))?;
            log.sources.push(source);
        }
        Ok(log)
    }

    /// Adds the pages that were written since the last call to `pages`. The last call is made when all who write have
    /// stopped.
    ///
    /// # Errors
    ///
    /// As [`DirtySource::collect`].
    pub fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        self.sources.iter_mut().try_for_each(|source| source.collect(pages).map_err(|error| of(&**source, &error)))
    }

    /// The pages of `chunk` are copied next.
    ///
    /// # Errors
    ///
    /// As [`DirtySource::release`].
    pub fn release(&mut self, chunk: &Chunk) -> io::Result<()> {
        self.sources.iter_mut().try_for_each(|source| source.release(chunk).map_err(|error| of(&**source, &error)))
    }
}

impl Drop for DirtyLog {
    fn drop(&mut self) {
        self.sources.iter_mut().rev().for_each(|source| source.stop());
    }
}

/// An error of a source.
fn of(source: &dyn DirtySource, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot log what {} to guest memory: {error}", source.name()))
}
