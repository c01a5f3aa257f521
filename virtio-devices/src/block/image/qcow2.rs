//! A qcow2 image: clusters that are allocated as they are written, over a read-only backing file.
//!
//! The crate imago implements the format. This module opens the files that an image names, under our locks and with our
//! limits, and keeps one owner of its metadata: requests of several queues share one [`FormatAccess`], whose tables
//! have their own locks, and freeing clusters excludes all other requests.

mod blocks;
mod grow;
mod header;
mod refcounts;
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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use imago::file::File as Storage;
use imago::qcow2::Qcow2 as Format;
use imago::raw::Raw;
use imago::storage::PreallocateMode;
use imago::{FormatAccess, ShallowMapping, Storage as _, StorageOpenOptions};
use log::error;
use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::fs::{FallocateFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::access::{Access, ImageFormat};
use super::aligned_buffer::AlignedBuffer;
use super::file::{ImageFile, size_of};
use super::lock::{lock, unlock};
use crate::block::call::Call;
use crate::block::error::{BlockError, ResizeError};
use crate::block::geometry::{Geometry, SECTOR};
use crate::block::operation::{Abilities, Range};
use blocks::Blocks;
use header::{HEAD, Header, MAGIC};

/// The most images in a chain of backing files.
const MAX_CHAIN: usize = 32;

/// The most clusters that one call zeroes, which bounds the time that other queues, a pause and a stop wait.
const AT_ONCE: u64 = 64;

/// An open image with its backing files. Dropping it writes cached metadata.
pub(crate) struct Qcow2 {
    /// Read-locked to read, write and flush; write-locked to free clusters, which must not be read at the same time.
    /// `None` while another program may write the image, because its tables are cached.
    image: RwLock<Option<Layer>>,
    /// The size of the disk in bytes.
    size: AtomicU64,
    /// True unless punching a hole has failed.
    punches: AtomicBool,
    /// The open file, which holds the lock. The image has a duplicate of the descriptor.
    fd: OwnedFd,
    path: PathBuf,
    header: Header,
    access: Access,
}

/// An image and its backing images.
struct Layer {
    access: FormatAccess<Storage>,
    /// The size of the disk of the next lower image, in bytes.
    below: u64,
}

impl Qcow2 {
    /// Opens the image in the locked file `fd` at `path`, and its backing files if it may have any.
    ///
    /// # Errors
    ///
    /// Fails if the file is not a usable image.
    pub(crate) fn open(path: &Path, fd: OwnedFd, access: Access) -> Result<Self, BlockError> {
        let (image, header) = layer(path, copy(path, &fd)?, access, MAX_CHAIN)?;
        Ok(Self::new(Some(image), path, fd, header, access))
    }

    /// The image in the file `fd` at `path`, which another program writes. Checks the parts that do not change: the
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
        Ok(Self::new(None, path, fd, header, access))
    }

    fn new(image: Option<Layer>, path: &Path, fd: OwnedFd, header: Header, access: Access) -> Self {
        let (image, size) = (RwLock::new(image), AtomicU64::new(header.size));
        Self { image, size, punches: AtomicBool::new(true), fd, path: path.into(), header, access }
    }

    /// Writes cached metadata, and flushes everything to the medium.
    ///
    /// # Errors
    ///
    /// The image cannot be written.
    pub(crate) fn flush(&self) -> Result<(), BlockError> {
        self.image().and_then(|image| sync(&image)).map_err(|source| self.not_flushed(source))
    }

    fn not_flushed(&self, source: io::Error) -> BlockError {
        BlockError::File { path: self.path.clone(), action: "be flushed", source }
    }

    /// Writes cached metadata, and closes and unlocks the image.
    ///
    /// # Errors
    ///
    /// The image cannot be written. It is still open and locked then.
    pub(crate) fn release(&self) -> Result<(), BlockError> {
        let mut image = self.image.write();
        image.as_ref().map_or(Ok(()), |layer| layer.access.flush()).map_err(|source| self.not_flushed(source))?;
        // Flushed above, so that dropping it writes nothing.
        *image = None;
        unlock(&self.path, self.fd.as_fd());
        Ok(())
    }

    /// Locks the image, and opens it in its present state.
    ///
    /// # Errors
    ///
    /// Another program has it locked, or it is another image. It is neither locked nor open then.
    pub(crate) fn take(&self) -> Result<(), BlockError> {
        let mut image = self.image.write();
        lock(&self.path, self.fd.as_fd(), self.access, size_of(&self.path, &self.fd)?)?;
        let opened = copy(&self.path, &self.fd).and_then(|fd| layer(&self.path, fd, self.access, MAX_CHAIN));
        let (was, features) = (self.size.load(Ordering::Acquire), self.header.has_zero_clusters);
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
        // No queue runs while the image is closed.
        RwLockReadGuard::try_map(self.image.read(), |image| image.as_ref().map(|layer| &layer.access))
            .map_err(|_| Errno::BADF.into())
    }

    /// True if clusters can be marked as zero.
    pub(crate) fn has_zero_clusters(&self) -> bool {
        self.header.has_zero_clusters
    }

    /// The operations that the image supports.
    pub(crate) fn abilities(&self) -> Abilities {
        let Access { read_only, sparse, .. } = self.access;
        // A write of less than a page costs a read.
        let sectors = self.size.load(Ordering::Acquire) / SECTOR;
        let geometry = Geometry { sectors, block_size: 512, physical_exponent: 3 };
        let discard = self.header.has_zero_clusters && sparse && !read_only;
        Abilities { geometry, read_only, zero: !read_only, discard }
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

    /// Executes a call that transfers nothing; transfers use [`Self::read`] and [`Self::write`], because guest memory
    /// cannot be lent to a library. Zeroes only the beginning of a range. Returns the number of bytes.
    pub(crate) fn execute(&self, call: Call<'_>) -> io::Result<usize> {
        let (range, unmap) = match call {
            Call::Read(..) | Call::Write { .. } => return Err(Errno::INVAL.into()),
            Call::Sync => return sync(&*self.image()?).map(|()| 0),
            Call::Zero { range, unmap } => (self.beginning(range), unmap),
        };
        if unmap {
            self.discard(range)?;
        } else {
            // imago 0.2 checks that the rest of a cluster is zero and later marks the whole cluster, without seeing
            // another queue's writes in between.
            let image = RwLockWriteGuard::try_map(self.image.write(), Option::as_mut);
            image.map_err(|_| Errno::BADF)?.access.write_zeroes(range.offset, range.len)?;
        }
        // A few clusters.
        Ok(range.len as usize)
    }

    /// The beginning of a range, to the end of a cluster.
    fn beginning(&self, Range { offset, len }: Range) -> Range {
        let cluster = u64::from(self.header.cluster);
        // Within the disk.
        let end = offset.saturating_add(AT_ONCE * cluster) / cluster * cluster;
        Range { offset, len: len.min(end.saturating_sub(offset)) }
    }

    /// Makes a range read as zeros, also over a backing file, and frees the space of its whole clusters. The clusters
    /// are unmapped first: they then read as zeros whichever tables are on the medium, and the rest of the range may be
    /// allocated one of them.
    fn discard(&self, range: Range) -> io::Result<()> {
        let image = RwLockWriteGuard::try_map(self.image.write(), Option::as_mut);
        let mut layer = image.map_err(|_| Errno::BADF)?;
        self.clusters(&layer.access, range)?.into_iter().for_each(|hole| self.punch(hole));
        layer.access.discard_to_zero(range.offset, range.len)
    }

    /// The file ranges of the clusters that only this range uses: neither shared with a snapshot nor compressed.
    fn clusters(&self, image: &FormatAccess<Storage>, range: Range) -> io::Result<Vec<Range>> {
        let cluster = u64::from(self.header.cluster);
        let (size, end) = (image.size(), range.offset.saturating_add(range.len));
        // The disk's last cluster can be partial.
        let end = if end == size { end } else { end / cluster * cluster };
        let mut at = range.offset.next_multiple_of(cluster);
        let mut places = Vec::new();
        while at < end {
            let (mapping, len) = image.get_shallow_mapping(at, end - at)?;
            if let ShallowMapping::Raw { offset, writable: true, .. } = mapping {
                places.push(Range { offset, len: len.next_multiple_of(cluster) });
            }
            if len == 0 {
                break;
            }
            at = at.saturating_add(len);
        }
        Ok(places)
    }

    /// Frees the space of a part of the file. If that fails, other clusters can still use the space.
    fn punch(&self, Range { offset, len }: Range) {
        if self.punches.load(Ordering::Relaxed) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(Errno::OPNOTSUPP) = rustix::fs::fallocate(&self.fd, flags, offset, len) {
                self.punches.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Enlarges the disk.
    ///
    /// # Errors
    ///
    /// The image cannot have that size, and keeps the old one. If the changed tables cannot be read again, all later
    /// requests fail.
    pub(crate) fn resize(&self, size: u64) -> Result<(), ResizeError> {
        if self.access.read_only {
            return Err(ResizeError::ReadOnly);
        }
        let mut image = self.image.write();
        let layer = image.as_ref().ok_or(Errno::BADF)?;
        let old = self.size.load(Ordering::Acquire);
        if size < old {
            return Err(ResizeError::Shrink);
        }
        if layer.below > old {
            return Err(ResizeError::Backing(layer.below));
        }
        if FileType::from_raw_mode(rustix::fs::fstat(&self.fd)?.st_mode) != FileType::RegularFile {
            return Err(ResizeError::NotAFile);
        }
        sync(&layer.access)?;
        let host = |error: BlockError| ResizeError::Host(io::Error::other(error.to_string()));
        // The guest may have overwritten the tables of a damaged image since it was opened.
        let sound = || {
            let header = Header::parse(&self.path, &part(&self.path, &self.fd, 0)?)?;
            check_refcounts(&self.path, &self.fd, &header).map(|()| header)
        };
        let header = sound().map_err(host)?;
        if header.snapshots > 0 {
            return Err(ResizeError::Snapshots(header.snapshots));
        }
        let file = Blocks(self.fd.as_fd());
        let end = size_of(&self.path, &self.fd).map_err(host)?;
        let grown = self.clear_tail(&layer.access, &file).map_err(ResizeError::from);
        let grown = grown.and_then(|()| grow::grow(&file, &header, size, end));
        let noted = size_of(&self.path, &self.fd).map_err(host).and_then(|end| Ok(note_length(&layer.access, end)?));
        // SAFETY: the image's file is consistent, nothing is only cached, and the lock excludes all others.
        let read =
            noted.and_then(|()| sound().map_err(host)).and_then(|_| Ok(unsafe { layer.access.invalidate_cache() }?));
        if let Err(error) = read {
            *image = None;
            return Err(error);
        }
        grown?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// Zeroes the rest of the disk's last cluster, behind the disk's end.
    fn clear_tail(&self, image: &FormatAccess<Storage>, file: &Blocks<'_>) -> io::Result<()> {
        let (size, cluster) = (image.size(), u64::from(self.header.cluster));
        let tail = size.next_multiple_of(cluster) - size;
        let mapping = image.get_shallow_mapping(size.saturating_sub(SECTOR), SECTOR)?.0;
        match mapping {
            // Less than a cluster.
            ShallowMapping::Raw { offset, writable: true, .. } if tail > 0 => {
                file.write(offset.saturating_add(SECTOR), &vec![0; tail as usize])
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        if !self.access.read_only
            && let Some(image) = self.image.get_mut()
            && let Err(error) = sync(&image.access)
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

/// Writes cached tables, then flushes everything to the medium.
fn sync(image: &FormatAccess<Storage>) -> io::Result<()> {
    image.flush()?;
    image.sync()
}

/// True if the file `fd` at `path`, whose format is not configured, is a qcow2 image that names no other file. A guest
/// that turned a raw image into such a one has changed nothing but its own disk.
///
/// # Errors
///
/// The file begins like an image that names another file, or that cannot be used.
pub(crate) fn stands_alone(path: &Path, fd: &OwnedFd) -> Result<bool, BlockError> {
    // A read error shows again when the file is opened as a raw image.
    let Some(head) = part(path, fd, 0).ok().filter(|head| head.starts_with(MAGIC)) else { return Ok(false) };
    match Header::parse(path, &head) {
        Ok(Header { backing: None, .. }) => Ok(true),
        Ok(Header { backing: Some((name, _)), .. }) => {
            Err(BlockError::MaybeQcow2 { path: path.into(), name: name.escape_debug().to_string() })
        }
        Err(BlockError::Qcow2 { path, what }) => Err(BlockError::LikeQcow2 { path, what }),
        Err(other) => Err(other),
    }
}

/// Opens a qcow2 image and at most `depth` backing images.
fn layer(path: &Path, fd: OwnedFd, access: Access, depth: usize) -> Result<(Layer, Header), BlockError> {
    let fail = |source: io::Error| BlockError::File { path: path.into(), action: "be opened", source };
    let header = Header::parse(path, &part(path, &fd, 0)?)?;
    check_refcounts(path, &fd, &header)?;
    let storage = storage(fd, access).map_err(fail)?;
    let mut image = Format::<Storage>::open_image(storage, !access.read_only).map_err(fail)?;
    // Files that the header names are opened here or not at all.
    image.set_data_file(None);
    let backing = header.backing.as_ref().map(|(name, format)| backing(path, name, format.as_deref(), access, depth));
    let backing = backing.transpose()?;
    let below = backing.as_ref().map_or(0, FormatAccess::size);
    image.set_backing(backing);
    Ok((Layer { access: FormatAccess::new(image), below }, header))
}

/// Checks the refcount table of the image in `fd`, which begins with `header`.
fn check_refcounts(path: &Path, fd: &OwnedFd, header: &Header) -> Result<(), BlockError> {
    let fail = |source: io::Error| BlockError::File { path: path.into(), action: "be read", source };
    // The header's bounds hold: at most 8 MiB.
    let len = usize::try_from(header.tables.refcount_entries.saturating_mul(8)).unwrap_or(usize::MAX);
    let table = Blocks(fd.as_fd()).read(header.tables.refcounts, len).map_err(fail)?;
    header.check_refcounts(path, &table, size_of(path, fd)?)
}

/// Notes that the file of an image has `len` bytes: otherwise imago truncates the file when it writes beyond the length
/// that it knows.
fn note_length(image: &FormatAccess<Storage>, len: u64) -> io::Result<()> {
    // The image's own file comes after those of its backing images.
    let storage = image.inner().collect_storage_dependencies().into_iter().next_back();
    storage.map_or(Ok(()), |storage| storage.resize(len, PreallocateMode::None))
}

fn storage(fd: OwnedFd, access: Access) -> io::Result<Storage> {
    let options = StorageOpenOptions::new().direct(access.direct).write(!access.read_only);
    Storage::from_open_file(File::from(fd), options)
}

/// The [`HEAD`] bytes of a file at `offset`, or fewer at the file's end.
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

/// The backing files of the image at `path`, as far as their headers can be read. Nothing is checked: opening them
/// reports faults.
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

/// True if the backing chain of the image at `path` has a loop.
fn has_loop(path: &Path) -> bool {
    let file = |path: &Path| rustix::fs::stat(path).ok().map(|file| (file.st_dev, file.st_ino));
    let mut seen = HashSet::from([file(path)]);
    chain(path).iter().any(|below| file(below).is_some_and(|file| !seen.insert(Some(file))))
}

/// True if the name of a backing file is a path, not a URL or a JSON description.
fn is_path(name: &str) -> bool {
    !name.starts_with("json:") && !name.contains("://")
}

/// Path of the backing file `name` of the image at `path`: a relative name is relative to the image's folder.
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
    // Only the top image checks the whole chain.
    if depth + 1 == MAX_CHAIN && has_loop(path) {
        return refuse(format!(
            "its backing files are a loop that begins with {name}; name one that ends it: qemu-img rebase -u -b"
        ));
    }
    let access = Access { read_only: true, ..access };
    let open = || match ImageFile::open(&below, access) {
        // An empty file in its place would read as zeros.
        Err(BlockError::Missing(missing)) => Err(refused(format!(
            "its backing file {name} does not exist ({}); put it there, or name where it is: qemu-img rebase -u -b",
            missing.display()
        ))),
        opened => opened,
    };
    match format {
        Some("qcow2") => {
            let ImageFile { fd, .. } = open()?;
            Ok(layer(&below, fd, access, depth)?.0.access)
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
