//! A qcow2 image: clusters that are allocated as they are written, over a backing file that is only read.
//!
//! The format itself is the crate imago's work. This opens what an image names, under our locks and with our limits,
//! and keeps one owner of its metadata: requests of several queues go through one [`FormatAccess`], whose tables have
//! locks of their own, and what frees clusters excludes all other requests.

mod header;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use imago::file::File as Storage;
use imago::qcow2::Qcow2 as Format;
use imago::raw::Raw;
use imago::{FormatAccess, StorageOpenOptions};
use log::error;
use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::access::{Access, ImageFormat};
use super::aligned_buffer::AlignedBuffer;
use super::call::Call;
use super::error::BlockError;
use super::file::{ImageFile, size_of};
use super::geometry::{Geometry, SECTOR};
use super::lock::{lock, unlock};
use super::operation::{Abilities, Range};
use header::{HEAD, Header};

/// The most images in a chain of backing files.
const MAX_CHAIN: usize = 32;

/// An open image with its backing files. Dropping it writes what is only in memory.
pub(crate) struct Qcow2 {
    /// Read by those who read, write and flush; written by those who free clusters, which others must not be reading.
    /// None while another program may write the image: its tables are kept in memory.
    image: RwLock<Option<FormatAccess<Storage>>>,
    /// The open file, whose lock it is. The image has a copy of the descriptor.
    fd: OwnedFd,
    path: PathBuf,
    header: Header,
    access: Access,
}

impl Qcow2 {
    /// Makes a disk of the file `fd` at `path`, which is locked, and opens its backing files if it may have any.
    ///
    /// # Errors
    ///
    /// When it is not an image that can be used.
    pub(crate) fn open(path: &Path, fd: OwnedFd, access: Access) -> Result<Self, BlockError> {
        let (image, header) = layer(path, copy(path, &fd)?, access, MAX_CHAIN)?;
        Ok(Self { image: RwLock::new(Some(image)), fd, path: path.into(), header, access })
    }

    /// The image in the file `fd` at `path`, which another program writes. What that does not change is checked: the
    /// header, and the backing files. [`Self::take`] opens it.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub(crate) fn closed(path: &Path, fd: OwnedFd, access: Access) -> Result<Self, BlockError> {
        let header = Header::parse(path, &part(path, &fd, 0)?)?;
        if let Some((name, format)) = &header.backing {
            backing(path, name, format.as_deref(), access, MAX_CHAIN)?;
        }
        Ok(Self { image: RwLock::new(None), fd, path: path.into(), header, access })
    }

    /// Writes what is only in memory, and has everything on the medium.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub(crate) fn flush(&self) -> Result<(), BlockError> {
        self.image().and_then(|image| sync(&image)).map_err(|source| self.not_flushed(source))
    }

    fn not_flushed(&self, source: io::Error) -> BlockError {
        BlockError::File { path: self.path.clone(), action: "be flushed", source }
    }

    /// Writes what is only in memory, and gives the image and its lock up.
    ///
    /// # Errors
    ///
    /// It cannot be written. The image is still open and locked then.
    pub(crate) fn release(&self) -> Result<(), BlockError> {
        let mut image = self.image.write();
        image.as_ref().map_or(Ok(()), FormatAccess::flush).map_err(|source| self.not_flushed(source))?;
        // It has nothing left to write.
        *image = None;
        unlock(&self.path, self.fd.as_fd());
        Ok(())
    }

    /// Locks the image, and opens it as it is now.
    ///
    /// # Errors
    ///
    /// Somebody else has it, or it is another one. It is neither locked nor open then.
    pub(crate) fn take(&self) -> Result<(), BlockError> {
        let mut image = self.image.write();
        lock(&self.path, self.fd.as_fd(), self.access, size_of(&self.path, &self.fd)?)?;
        let opened = copy(&self.path, &self.fd).and_then(|fd| layer(&self.path, fd, self.access, MAX_CHAIN));
        let (was, features) = (self.header.size, self.header.has_zero_clusters);
        let opened = opened.and_then(|(open, header)| match header.size {
            is if is != was || header.has_zero_clusters != features => {
                Err(BlockError::Changed { path: self.path.clone(), was, is })
            }
            _ => Ok(open),
        });
        match opened {
            Ok(open) => *image = Some(open),
            Err(error) => {
                unlock(&self.path, self.fd.as_fd());
                return Err(error);
            }
        }
        Ok(())
    }

    fn image(&self) -> io::Result<MappedRwLockReadGuard<'_, FormatAccess<Storage>>> {
        // No queue runs while it is closed.
        RwLockReadGuard::try_map(self.image.read(), Option::as_ref).map_err(|_| Errno::BADF.into())
    }

    /// What can be done with it.
    pub(crate) fn abilities(&self) -> Abilities {
        let Access { read_only, sparse, .. } = self.access;
        let zero = self.header.has_zero_clusters && !read_only;
        // A write of less than a page costs a read.
        let geometry = Geometry { sectors: self.header.size / SECTOR, block_size: 512, physical_exponent: 3 };
        Abilities { geometry, read_only, zero, discard: zero && sparse }
    }

    /// Reads all of `data` at `offset`.
    pub(crate) fn read(&self, data: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = data.len();
        self.image()?.read(data, offset)?;
        Ok(len)
    }

    /// Writes all of `data` at `offset`; `stable` means to the medium.
    pub(crate) fn write(&self, data: &[u8], offset: u64, stable: bool) -> io::Result<usize> {
        let image = self.image()?;
        image.write(data, offset)?;
        if stable {
            sync(&image)?;
        }
        Ok(data.len())
    }

    /// Carries out a call that transfers nothing; those that do go by [`Self::read`] and [`Self::write`], because a
    /// guest's memory cannot be lent to a library.
    pub(crate) fn execute(&self, call: Call<'_>) -> io::Result<usize> {
        match call {
            Call::Read(..) | Call::Write { .. } => return Err(Errno::INVAL.into()),
            Call::Sync => sync(&*self.image()?)?,
            Call::Zero { range: Range { offset, len }, unmap: false } => self.image()?.write_zeroes(offset, len)?,
            Call::Zero { range: Range { offset, len }, unmap: true } => {
                let image = RwLockWriteGuard::try_map(self.image.write(), Option::as_mut);
                image.map_err(|_| Errno::BADF)?.discard_to_zero(offset, len)?;
            }
        }
        Ok(0)
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        if !self.access.read_only
            && let Some(image) = self.image.get_mut()
            && let Err(error) = sync(image)
        {
            error!("{}: cannot be closed; repair it with qemu-img check: {error}", self.path.display());
        }
    }
}

/// Another descriptor of the same open file.
fn copy(path: &Path, fd: &OwnedFd) -> Result<OwnedFd, BlockError> {
    let fail = |source| BlockError::File { path: path.into(), action: "be opened", source };
    fd.try_clone().map_err(fail)
}

/// Writes the tables that are in memory, then has the host write everything to the medium.
fn sync(image: &FormatAccess<Storage>) -> io::Result<()> {
    image.flush()?;
    image.sync()
}

/// Opens a qcow2 image and those below it, of which there may be `depth`.
fn layer(
    path: &Path,
    fd: OwnedFd,
    access: Access,
    depth: usize,
) -> Result<(FormatAccess<Storage>, Header), BlockError> {
    let fail = |source: io::Error| BlockError::File { path: path.into(), action: "be opened", source };
    let header = Header::parse(path, &part(path, &fd, 0)?)?;
    Header::check_refcounts(path, &part(path, &fd, header.refcount_table)?)?;
    let storage = storage(fd, access).map_err(fail)?;
    let mut image = Format::<Storage>::open_image(storage, !access.read_only).map_err(fail)?;
    // What the header names is opened here or not at all.
    image.set_data_file(None);
    let backing = header.backing.as_ref().map(|(name, format)| backing(path, name, format.as_deref(), access, depth));
    image.set_backing(backing.transpose()?);
    Ok((FormatAccess::new(image), header))
}

fn storage(fd: OwnedFd, access: Access) -> io::Result<Storage> {
    let options = StorageOpenOptions::new().direct(access.direct).write(!access.read_only);
    Storage::from_open_file(File::from(fd), options)
}

/// The [`HEAD`] bytes of a file at `offset`, or all that it has there.
fn part(path: &Path, fd: &OwnedFd, offset: u64) -> Result<Vec<u8>, BlockError> {
    let mut buffer = AlignedBuffer::new(HEAD);
    let bytes = buffer.bytes(HEAD);
    loop {
        match rustix::io::pread(fd.as_fd(), &mut *bytes, offset) {
            Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(BlockError::File { path: path.into(), action: "be read", source: errno.into() });
            }
            Ok(len) => return Ok(bytes.get(..len).unwrap_or_default().to_vec()),
        }
    }
}

/// The files of the images below the one at `path`, as far as their headers can be read. They are only looked at: what
/// is wrong with them shows when they are opened.
pub(crate) fn chain(path: &Path) -> Vec<PathBuf> {
    let name = |path: &Path| {
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()).ok()?;
        let header = Header::parse(path, &part(path, &fd, 0).ok()?).ok()?;
        header.backing.filter(|(name, _)| is_path(name))
    };
    let mut files: Vec<PathBuf> = Vec::new();
    while files.len() < MAX_CHAIN {
        let last = files.last().map_or(path, PathBuf::as_path);
        let Some((name, format)) = name(last) else { break };
        files.push(below(last, &name));
        if format.as_deref() != Some("qcow2") {
            break;
        }
    }
    files
}

/// True if the images below the one at `path` lead to one of them, or to that one, again.
fn has_loop(path: &Path) -> bool {
    let file = |path: &Path| rustix::fs::stat(path).ok().map(|file| (file.st_dev, file.st_ino));
    let mut seen = HashSet::from([file(path)]);
    chain(path).iter().any(|below| file(below).is_some_and(|file| !seen.insert(Some(file))))
}

/// Whether the name of a backing file is a path, and not an address or a description of one.
fn is_path(name: &str) -> bool {
    !name.starts_with("json:") && !name.contains("://")
}

/// Where the backing file `name` of the image at `path` is: a relative name is one in the image's folder.
fn below(path: &Path, name: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(OsStr::new(name))
}

/// Opens the backing file `name` of the image at `path`.
fn backing(
    path: &Path,
    name: &str,
    format: Option<&str>,
    access: Access,
    depth: usize,
) -> Result<FormatAccess<Storage>, BlockError> {
    let refused = |what: String| BlockError::Qcow2 { path: path.into(), what };
    let refuse = |what| Err(refused(what));
    if !matches!(access.format, ImageFormat::Qcow2 { backing_files: true }) {
        return refuse(format!(
            "has the backing file {name}; add backing_files=on if you trust the image, which may name any file"
        ));
    }
    let Some(depth) = depth.checked_sub(1) else {
        return refuse(format!("is based on more than {MAX_CHAIN} images; merge some: qemu-img convert -O qcow2"));
    };
    if !is_path(name) {
        return refuse(format!(
            "has the backing file {name}, which is not a path; convert it: qemu-img convert -O qcow2"
        ));
    }
    let below = below(path, name);
    // The first looks at the whole chain.
    if depth + 1 == MAX_CHAIN && has_loop(path) {
        return refuse(format!(
            "its backing files are a loop that begins with {name}; name one that ends it: qemu-img rebase -u -b"
        ));
    }
    let access = Access { read_only: true, ..access };
    let open = || match ImageFile::open(&below, access) {
        // An empty file in its place would give the guest zeros.
        Err(BlockError::Missing(missing)) => Err(refused(format!(
            "its backing file {name} does not exist ({}); put it there, or name where it is: qemu-img rebase -u -b",
            missing.display()
        ))),
        opened => opened,
    };
    match format {
        Some("qcow2") => {
            let ImageFile { fd, .. } = open()?;
            Ok(layer(&below, fd, access, depth)?.0)
        }
        Some("raw") => {
            let fail = |source: io::Error| BlockError::File { path: below.clone(), action: "be opened", source };
            let ImageFile { fd, .. } = open()?;
            let raw = Raw::open_image(storage(fd, access).map_err(fail)?, false).map_err(fail)?;
            Ok(FormatAccess::new(raw))
        }
        Some(other) => refuse(format!(
            "has a backing file of the format {other}, which is not supported yet; convert it: \
             qemu-img convert -O qcow2"
        )),
        None => refuse(format!(
            "does not say the format of its backing file; say it: qemu-img rebase -u -b {name} -F raw {}",
            path.display()
        )),
    }
}
