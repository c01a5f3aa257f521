//! A raw image: a file, or a block device of the host.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use log::warn;
use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::error::BlockError;
use super::geometry::{Geometry, MAX_BLOCK, SECTOR};
use super::lock::{LockGranularity, lock};
use super::operation::Abilities;
use super::resize::ResizeError;

/// The smallest block in bytes.
const MIN_BLOCK: u32 = 512;
/// An open image. It is locked: a writer excludes all others.
#[derive(Debug)]
pub(crate) struct Image {
    fd: OwnedFd,
    path: PathBuf,
    access: Access,
    /// What can be done with it, at the size that it was opened with.
    abilities: Abilities,
    /// Its size in sectors, which [`Self::resize`] changes.
    sectors: AtomicU64,
    block_device: bool,
    /// What addresses and lengths in memory must be a multiple of: 1, or a block around the page cache.
    pub alignment: usize,
}

/// How an image is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    /// It is not written.
    pub read_only: bool,
    /// It is read and written around the page cache.
    pub direct: bool,
    /// It is raw whatever it begins with.
    pub surely_raw: bool,
    /// Space that is not needed is given back. Otherwise all of a file's space is allocated when it is opened.
    pub sparse: bool,
    /// The part of it that is locked.
    pub lock: LockGranularity,
}

/// Memory that is aligned to any block.
pub(crate) struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl AlignedBuffer {
    /// `len` zero bytes.
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0; len + MAX_BLOCK as usize];
        let start = bytes.as_ptr().align_offset(MAX_BLOCK as usize).min(MAX_BLOCK as usize);
        Self { bytes, start }
    }

    /// The bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> &mut [u8] {
        let end = (self.start + len).min(self.bytes.len());
        &mut self.bytes[self.start..end]
    }
}

impl Image {
    /// Opens and locks the image at `path`.
    ///
    /// # Errors
    ///
    /// When it is not a raw image, or cannot be used.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, BlockError> {
        let fail = |action| move |errno: Errno| BlockError::File { path: path.into(), action, source: errno.into() };
        let mut flags = OFlags::CLOEXEC | if access.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        flags.set(OFlags::DIRECT, access.direct);
        // A pipe would be waited for.
        let fd = match rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty()) {
            Err(Errno::INVAL) if access.direct => return Err(BlockError::Direct(path.into())),
            result => result.map_err(|errno| BlockError::open(path, access.read_only, errno))?,
        };
        let stat = rustix::fs::fstat(&fd).map_err(fail("be looked at"))?;
        let block_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            other => return Err(BlockError::Kind { path: path.into(), kind: kind(other) }),
        };
        rustix::fs::fcntl_setfl(&fd, flags).map_err(fail("be set up"))?;
        let mut block_size = MIN_BLOCK;
        let mut physical = u32::try_from(stat.st_blksize).unwrap_or(MIN_BLOCK);
        if block_device {
            block_size = rustix::fs::ioctl_blksszget(&fd).map_err(fail("tell its block size"))?;
            physical = rustix::fs::ioctl_blkpbszget(&fd).unwrap_or(block_size);
        }
        let size = || rustix::fs::seek(&fd, SeekFrom::End(0)).map_err(fail("tell its size"));
        lock(path, fd.as_fd(), access, size()?)?;
        block_size = first_block(path, fd.as_fd(), block_size, access)?;
        let size = size()?;
        if size == 0 || !size.is_multiple_of(block_size.into()) {
            return Err(BlockError::Size { path: path.into(), size, block: block_size });
        }
        let geometry =
            Geometry { sectors: size / SECTOR, block_size, physical_exponent: exponent(physical, block_size) };
        let zero = !access.read_only
            && if block_device { device_zeroes(stat.st_rdev) } else { punches_holes(fd.as_fd(), size, block_size) };
        let abilities = Abilities { geometry, read_only: access.read_only, zero, discard: zero && access.sparse };
        let alignment = if access.direct { block_size as usize } else { 1 };
        let sectors = AtomicU64::new(geometry.sectors);
        let image = Self { fd, path: path.into(), access, abilities, sectors, block_device, alignment };
        image.allocate(0, size)?;
        Ok(image)
    }

    /// What can be done with it now.
    pub(crate) fn abilities(&self) -> Abilities {
        let sectors = self.sectors.load(Ordering::Acquire);
        Abilities { geometry: Geometry { sectors, ..self.abilities.geometry }, ..self.abilities }
    }

    /// Its size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.abilities().geometry.sectors.saturating_mul(SECTOR)
    }

    /// Changes its size in bytes. Of a block device, which only the host can change, the size becomes known.
    ///
    /// # Errors
    ///
    /// When it cannot have that size. It has the old one then.
    pub(crate) fn resize(&self, size: u64) -> Result<(), ResizeError> {
        let block = self.abilities.geometry.block_size;
        if size == 0 || !size.is_multiple_of(block.into()) {
            return Err(ResizeError::Size(block));
        }
        if self.access.read_only {
            return Err(ResizeError::ReadOnly);
        }
        // The kernel would end a process that exceeds its limit.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| size > limit) || i64::try_from(size).is_err() {
            return Err(ResizeError::TooLarge);
        }
        if self.block_device {
            let own = rustix::fs::seek(&self.fd, SeekFrom::End(0))?;
            if own != size {
                return Err(ResizeError::BlockDevice(own));
            }
        } else {
            let old = self.size();
            lock(&self.path, self.fd.as_fd(), self.access, size).map_err(|_| ResizeError::InUse)?;
            rustix::fs::ftruncate(&self.fd, size)?;
            if size > old
                && let Err(error) = self.allocate(old, size - old)
            {
                // What there is no space for is taken away again; if that fails, the disk still has its old size.
                let _ = rustix::fs::ftruncate(&self.fd, old);
                return Err(ResizeError::Space(error.to_string()));
            }
        }
        self.sectors.store(size / SECTOR, Ordering::Release);
        Ok(())
    }

    /// Allocates the space of a part of a file that is not sparse. What is there stays.
    fn allocate(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        if self.access.sparse || self.access.read_only || self.block_device {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP) => {
                warn!("{}: sparse=off: its file system allocates no space ahead", self.path.display());
                Ok(())
            }
            Err(errno) => Err(BlockError::Space { path: self.path.clone(), source: errno.into() }),
        }
    }
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn kind(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        _ => "file of another kind",
    }
}

/// The size of physical blocks in blocks, as a power of two.
fn exponent(physical: u32, block: u32) -> u8 {
    if !physical.is_power_of_two() || physical < block || physical > MAX_BLOCK {
        return 0;
    }
    // Both are powers of two of at most 16 bits.
    (physical.trailing_zeros() - block.trailing_zeros()) as u8
}

/// Reads the first block: around the page cache, the smallest that can be read from `least` on. Looks what it begins
/// with.
fn first_block(path: &Path, fd: BorrowedFd<'_>, least: u32, access: Access) -> Result<u32, BlockError> {
    let mut buffer = AlignedBuffer::new(MAX_BLOCK as usize);
    let mut block = least;
    loop {
        match rustix::io::pread(fd, buffer.bytes(block as usize), 0) {
            Err(Errno::INTR) => {}
            Err(Errno::INVAL) if access.direct && block < MAX_BLOCK => block *= 2,
            Err(Errno::INVAL) if access.direct => return Err(BlockError::Direct(path.into())),
            Err(errno) => {
                return Err(BlockError::File { path: path.into(), action: "be read", source: errno.into() });
            }
            Ok(_) => break,
        }
    }
    match format(buffer.bytes(block as usize)) {
        Some(format) if !access.surely_raw => Err(BlockError::Format { path: path.into(), format }),
        _ => Ok(block),
    }
}

/// The format of an image that begins so, if it is another one than raw.
fn format(start: &[u8]) -> Option<&'static str> {
    const FORMATS: [(&[u8], &str); 4] =
        [(b"QFI\xfb", "qcow2"), (b"vhdxfile", "VHDX"), (b"conectix", "VHD"), (b"KDMV", "VMDK")];
    FORMATS.iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, name)| *name)
}

/// Whether a file's ranges can be given back: asked beyond its end, where there is nothing to lose.
fn punches_holes(fd: BorrowedFd<'_>, size: u64, block: u32) -> bool {
    rustix::fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, size, block.into()).is_ok()
}

/// Whether a block device, or what it is a partition of, can zero ranges by itself.
fn device_zeroes(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    ["queue", "../queue"].iter().any(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/write_zeroes_max_bytes");
        fs::read_to_string(path).is_ok_and(|text| text.trim().parse().is_ok_and(|bytes: u64| bytes > 0))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const WRITE: Access =
        Access { read_only: false, direct: false, surely_raw: false, sparse: true, lock: LockGranularity::ByteRange };
    const READ: Access = Access { read_only: true, ..WRITE };

    fn image(len: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(len).unwrap();
        file
    }

    fn refusal(path: &Path, access: Access) -> String {
        let line = Image::open(path, access).unwrap_err().to_string();
        assert!(!line.contains('\n') && line.contains("path="), "{line}");
        line
    }

    #[test]
    fn a_file_of_whole_blocks_is_a_disk() {
        let file = image(1 << 20);
        let image = Image::open(file.path(), WRITE).unwrap();
        let Abilities { geometry, read_only, .. } = image.abilities();
        assert_eq!((geometry.sectors, geometry.block_size, read_only, image.alignment), (2048, 512, false, 1));
        assert!(geometry.physical_exponent <= 7);
        assert_eq!([exponent(4096, 512), exponent(512, 512), exponent(512, 4096), exponent(3000, 512)], [3, 0, 0, 0]);
    }

    #[test]
    fn what_is_no_disk_is_refused_with_a_way_out() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("none.raw");
        assert!(refusal(&missing, WRITE).contains("truncate -s 10G"));
        assert!(refusal(directory.path(), READ).contains("is a directory"));
        assert!(refusal(directory.path(), WRITE).contains("is a directory"));
        assert!(refusal(Path::new("/dev/null"), WRITE).contains("is a character device"));
        let socket = directory.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(refusal(&socket, WRITE).contains("is a socket"));
        for len in [0, 511, 1000] {
            assert!(refusal(image(len).path(), WRITE).contains("truncate -s %512"), "{len}");
        }
        assert!(BlockError::open(&missing, false, Errno::ACCESS).to_string().contains("add readonly=on"));
        assert!(BlockError::open(&missing, true, Errno::ACCESS).to_string().contains("cannot be read"));
    }

    #[test]
    fn a_pipe_is_refused_without_waiting_for_its_other_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(refusal(&path, READ).contains("is a pipe"));
    }

    #[test]
    fn an_image_of_another_format_is_refused_unless_it_is_said_to_be_raw() {
        let file = image(4096);
        fs::write(file.path(), [&b"QFI\xfb"[..], &[0; 508]].concat()).unwrap();
        assert!(refusal(file.path(), WRITE).contains("qemu-img convert -O raw"));
        assert!(Image::open(file.path(), Access { surely_raw: true, ..WRITE }).is_ok());
    }

    #[test]
    fn a_writer_excludes_others_and_readers_do_not() {
        let file = image(512);
        let writer = Image::open(file.path(), WRITE).unwrap();
        assert!(refusal(file.path(), WRITE).contains("in use"));
        assert!(refusal(file.path(), READ).contains("in use"));
        drop(writer);
        let _readers = [0; 2].map(|_| Image::open(file.path(), READ).unwrap());
        assert!(refusal(file.path(), WRITE).contains("in use"));
    }

    #[test]
    fn a_lock_of_the_whole_file_reaches_beyond_its_end_and_one_of_its_bytes_does_not() {
        let beyond = |granularity| {
            let file = image(4096);
            let _image = Image::open(file.path(), Access { lock: granularity, ..WRITE }).unwrap();
            let other = fs::File::options().write(true).read(true).open(file.path()).unwrap();
            let range = |start, len| super::super::lock::try_lock(other.as_fd(), false, start, len).is_ok();
            assert!(!range(0, 1) && !range(4095, 1));
            range(4096, 1)
        };
        assert!(beyond(LockGranularity::ByteRange));
        assert!(!beyond(LockGranularity::Full));
    }

    #[test]
    fn an_image_that_is_not_sparse_has_all_of_its_space_and_gives_none_back() {
        let file = image(1 << 20);
        let sparse = Image::open(file.path(), WRITE).unwrap();
        assert_eq!(sparse.abilities().discard, sparse.abilities().zero);
        drop(sparse);
        let blocks = || std::os::unix::fs::MetadataExt::blocks(&file.as_file().metadata().unwrap());
        assert_eq!(blocks(), 0);
        let image = Image::open(file.path(), Access { sparse: false, ..WRITE }).unwrap();
        assert!(blocks() >= 2048, "{}", blocks());
        assert!(!image.abilities().discard);
        image.resize(2 << 20).unwrap();
        assert!(blocks() >= 4096, "{}", blocks());
        let unwritten = self::image(1 << 20);
        let _reader = Image::open(unwritten.path(), Access { sparse: false, ..READ }).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::blocks(&unwritten.as_file().metadata().unwrap()), 0);
    }

    #[test]
    fn an_image_has_the_size_that_it_is_given_or_keeps_its_own() {
        let file = image(1 << 20);
        let image = Image::open(file.path(), WRITE).unwrap();
        let len = || file.as_file().metadata().unwrap().len();
        for size in [4 << 20, 512, 1 << 20] {
            image.resize(size).unwrap();
            assert_eq!((len(), image.size()), (size, size));
        }
        for size in [0, 511, 513, u64::MAX] {
            assert!(matches!(image.resize(size), Err(ResizeError::Size(512))), "{size}");
        }
        for size in [u64::MAX - 511, i64::MAX as u64 - 511] {
            assert!(matches!(image.resize(size), Err(ResizeError::TooLarge)), "{size}");
        }
        assert_eq!((len(), image.size()), (1 << 20, 1 << 20));
        // What was added is locked as well.
        image.resize(2 << 20).unwrap();
        let other = fs::File::options().write(true).read(true).open(file.path()).unwrap();
        assert!(super::super::lock::try_lock(other.as_fd(), false, 3 << 19, 1).is_err());
        drop(image);
        let reader = Image::open(file.path(), READ).unwrap();
        assert!(matches!(reader.resize(4096), Err(ResizeError::ReadOnly)));
    }

    #[test]
    fn direct_access_has_aligned_blocks_or_is_refused() {
        let file = image(1 << 20);
        match Image::open(file.path(), Access { direct: true, ..WRITE }) {
            Ok(image) => {
                assert!(image.alignment >= 512);
                assert_eq!(image.alignment, image.abilities.geometry.block_size as usize);
            }
            Err(error) => assert!(matches!(error, BlockError::Direct(_)), "{error}"),
        }
    }
}
