//! Dirty pages of a running guest's memory, from every writer.
//!
//! No single log covers all writes: KVM logs the vCPUs', this process its own threads', and each backend that runs
//! queues itself its own. Each has a [`DirtySource`]; a page is dirty if any source reports it.
//!
//! A page is removed from the log before it is copied, so a write during the copy is logged again for the next pass.
//! After the last writer has stopped, one more collection finds the rest.

mod backends;
mod kvm;
mod own;
mod page_set;
mod source;
mod stopped_backends;
#[cfg(test)]
mod tests;

use std::io;

pub use backends::{Backends, FindUsers};
pub use kvm::Vcpus;
pub use own::OwnThreads;
pub use page_set::{CHUNK_PAGES, Chunk, PageSet};
pub use source::DirtySource;
pub use stopped_backends::StoppedBackends;

/// All dirty-page sources of a guest.
pub struct DirtyLog {
    sources: Vec<Box<dyn DirtySource>>,
}

impl DirtyLog {
    /// Starts the dirty logs of `sources`. Every page must be sent once after this.
    ///
    /// # Errors
    ///
    /// Fails if a source cannot log: its name and the reason. All logs are off then.
    pub fn start(sources: Vec<Box<dyn DirtySource>>) -> io::Result<Self> {
        let mut log = Self { sources: Vec::with_capacity(sources.len()) };
        for mut source in sources {
            // If one fails, dropping `log` stops those before it.
            source.start().map_err(|error| of(&*source, &error))?;
            log.sources.push(source);
        }
        Ok(log)
    }

    /// Adds the pages written since the last call to `pages`. The final call comes after all writers have stopped.
    ///
    /// # Errors
    ///
    /// As [`DirtySource::collect`].
    pub fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        self.sources.iter_mut().try_for_each(|source| source.collect(pages).map_err(|error| of(&**source, &error)))
    }

    /// Prepares for copying the pages of `chunk`.
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

/// Error of a source, with its name.
fn of(source: &dyn DirtySource, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot log what {} to guest memory: {error}", source.name()))
}
