//! A qcow2 image: clusters that are allocated as they are written, over a backing file that is only read.
//!
//! The format itself is the crate imago's work. This opens what an image names, under our locks and with our limits,
//! and keeps one owner of its metadata: requests of several queues go through one [`FormatAccess`], whose tables have
//! locks of their own, and what frees clusters excludes all other requests.

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
use super::call::Call;
use super::error::{BlockError, ResizeError};
use super::file::{ImageFile, size_of};
use super::geometry::{Geometry, SECTOR};
use super::lock::{lock, unlock};
use super::operation::{Abilities, Range};
use blocks::Blocks;
use header::{HEAD, Header, MAGIC};

/// The most images in a chain of backing files.
const MAX_CHAIN: usize = 32;

/// The most clusters that one call zeroes, so that other queues, a pause and a stop wait for no more.
const AT_ONCE: u64 = 64;

/// An open image with its backing files. Dropping it writes what is only in memory.
pub(crate) struct Qcow2 {
    /// Read by those who read, write and flush; written by those who free clusters, which others must not be reading.
    /// None while another program may write the image: its tables are kept in memory.
    image: RwLock<Option<Layer>>,
    /// The size of the disk in bytes.
    size: AtomicU64,
    /// The file gives space back, as far as is known.
    punches: AtomicBool,
    /// The open file, whose lock it is. The image has a copy of the descriptor.
    fd: OwnedFd,
    path: PathBuf,
    header: Header,
    access: Access,
}

/// An image, with those below it.
struct Layer {
    access: FormatAccess<Storage>,
    /// The size of the disk of the image directly below, in bytes.
    below: u64,
}

impl Qcow2 {
    /// Makes a disk of the file `fd` at `path`, which is locked, and opens its backing files if it may have any.
    ///
    /// # Errors
    ///
    /// Fails if it is not an image that can be used.
    pub(crate) fn open(path: &Path, fd: OwnedFd, access: Access) -> Result<Self, BlockError> {
        let (image, header) = layer(path, copy(path, &fd)?, access, MAX_CHAIN)?;
        Ok(Self::new(Some(image), path, fd, header, access))
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
        Ok(Self::new(None, path, fd, header, access))
    }

    fn new(image: Option<Layer>, path: &Path, fd: OwnedFd, header: Header, access: Access) -> Self {
        let (image, size) = (RwLock::new(image), AtomicU64::new(header.size));
        Self { image, size, punches: AtomicBool::new(true), fd, path: path.into(), header, access }
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
        image.as_ref().map_or(Ok(()), |layer| layer.access.flush()).map_err(|source| self.not_flushed(source))?;
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
        // No queue runs while it is closed.
        RwLockReadGuard::try_map(self.image.read(), |image| image.as_ref().map(|layer| &layer.access))
            .map_err(|_| Errno::BADF.into())
    }

    /// True if clusters can be marked as zero.
    pub(crate) fn has_zero_clusters(&self) -> bool {
        self.header.has_zero_clusters
    }

    /// Operations that it supports.
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

    /// Carries out a call that transfers nothing; those that do go by [`Self::read`] and [`Self::write`], because a
    /// guest's memory cannot be lent to a library. Of a range, the beginning is zeroed. Returns how much.
    pub(crate) fn execute(&self, call: Call<'_>) -> io::Result<usize> {
        let (range, unmap) = match call {
            Call::Read(..) | Call::Write { .. } => return Err(Errno::INVAL.into()),
            Call::Sync => return sync(&*self.image()?).map(|()| 0),
            Call::Zero { range, unmap } => (self.beginning(range), unmap),
        };
        if unmap {
            self.discard(range)?;
        } else {
            // imago 0.2 looks whether the rest of a cluster is zero, and marks all of it later, without a look at what
            // another queue has written to it meanwhile.
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

    /// Has a range read as zeros, also over a backing file, and gives back the space of its whole clusters. The file
    /// loses them first, so that they read as zeros whichever tables are on the medium, and because what is left of the
    /// range may take one of the clusters.
    fn discard(&self, range: Range) -> io::Result<()> {
        let image = RwLockWriteGuard::try_map(self.image.write(), Option::as_mut);
        let mut layer = image.map_err(|_| Errno::BADF)?;
        self.clusters(&layer.access, range)?.into_iter().for_each(|hole| self.punch(hole));
        layer.access.discard_to_zero(range.offset, range.len)
    }

    /// The places in the file of the clusters that a range has to itself: neither shared with a snapshot nor
    /// compressed.
    fn clusters(&self, image: &FormatAccess<Storage>, range: Range) -> io::Result<Vec<Range>> {
        let cluster = u64::from(self.header.cluster);
        let (size, end) = (image.size(), range.offset.saturating_add(range.len));
        // The disk's last cluster need not be a whole one.
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

    /// Gives the space of a part of the file back. If that fails, the space stays there for other clusters.
    fn punch(&self, Range { offset, len }: Range) {
        if self.punches.load(Ordering::Relaxed) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(Errno::OPNOTSUPP) = rustix::fs::fallocate(&self.fd, flags, offset, len) {
                self.punches.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Makes the disk larger.
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
        // A damaged image may have the tables where the guest writes, so that they are not as they were when it was
        // opened.
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
        // SAFETY: the image's file is sound as it is, nothing is only in memory, and the lock keeps all others out.
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

    /// Zeroes the rest of the disk's last cluster, which lies behind its end.
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

/// Writes the tables that are in memory, then has the host write everything to the medium.
fn sync(image: &FormatAccess<Storage>) -> io::Result<()> {
    image.flush()?;
    image.sync()
}

/// True if the file `fd` at `path` is a qcow2 image that leads to no other file, although its format is not said. A
/// guest that made a raw image into such a one has changed nothing but its own disk.
///
/// # Errors
///
/// It begins like one that leads elsewhere, or that cannot be used.
pub(crate) fn stands_alone(path: &Path, fd: &OwnedFd) -> Result<bool, BlockError> {
    // If it cannot be read, that shows when it is opened as a raw one.
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

/// Opens a qcow2 image and those below it, of which there may be `depth`.
fn layer(path: &Path, fd: OwnedFd, access: Access, depth: usize) -> Result<(Layer, Header), BlockError> {
    let fail = |source: io::Error| BlockError::File { path: path.into(), action: "be opened", source };
    let header = Header::parse(path, &part(path, &fd, 0)?)?;
    check_refcounts(path, &fd, &header)?;
    let storage = storage(fd, access).map_err(fail)?;
    let mut image = Format::<Storage>::open_image(storage, !access.read_only).map_err(fail)?;
    // What the header names is opened here or not at all.
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

/// Notes that the file of an image has `len` bytes: what is written beyond the length that imago knows makes it cut the
/// file there.
fn note_length(image: &FormatAccess<Storage>, len: u64) -> io::Result<()> {
    // The image's own file comes after those of the images below it.
    let storage = image.inner().collect_storage_dependencies().into_iter().next_back();
    storage.map_or(Ok(()), |storage| storage.resize(len, PreallocateMode::None))
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

/// True if the name of a backing file is a path, and not an address or a description of one.
fn is_path(name: &str) -> bool {
    !name.starts_with("json:") && !name.contains("://")
}

/// Path of the backing file `name` of the image at `path`: a relative name is one in the image's folder.
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
