//! Reasons why a disk cannot be used.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

use crate::ErrorKind;

/// Reason why a disk cannot be opened: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum BlockError {
    /// A queue cannot run on any of its CPUs.
    #[error("queue_affinity=[{0}@...]: this process can run on none of the CPUs given; give others")]
    Cpus(u16),
    /// The file does not exist.
    #[error("path={}: does not exist; create it: truncate -s 10G {}", .0.display(), .0.display())]
    Missing(PathBuf),
    /// The file is not writable, or is on a read-only file system.
    #[error("path={}: cannot be written; give this user write access, or add readonly=on", .0.display())]
    NotWritable(PathBuf),
    /// The file may not be read.
    #[error("path={}: cannot be read; give this user read access", .0.display())]
    NotReadable(PathBuf),
    /// The file is neither a file nor a block device.
    #[error("path={}: is a {kind}; give a raw image in a file, or a block device", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// Kind of the file.
        kind: &'static str,
    },
    /// The file has no room for a block.
    #[error(
        "path={}: its size, {size} bytes, is less than a block of {block} bytes; give a larger image", path.display()
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Size in bytes.
        size: u64,
        /// The size of its blocks in bytes.
        block: u32,
    },
    /// The file is an image of another format.
    #[error(
        "path={}: is a {format} image, and only raw and qcow2 ones are supported; convert it: \
         qemu-img convert -O raw {} {}.raw; if it is raw nevertheless, add image_type=raw",
        path.display(), path.display(), path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The detected format.
        format: &'static str,
    },
    /// The file begins like a qcow2 image that names another file; a guest may have written that.
    #[error(
        "path={}: begins like a qcow2 image with the backing file {name}; add image_type=qcow2,backing_files=on if you \
         trust it, or image_type=raw if it is a raw one", path.display()
    )]
    MaybeQcow2 {
        /// The file.
        path: PathBuf,
        /// The backing file, in printable characters.
        name: String,
    },
    /// The file begins like a qcow2 image that cannot be used.
    #[error("path={}: begins like a qcow2 image and {what}; add image_type=raw if it is a raw one", path.display())]
    LikeQcow2 {
        /// The file.
        path: PathBuf,
        /// The problem, and the remedy.
        what: String,
    },
    /// The file is not a qcow2 image, or has an unsupported feature.
    #[error("path={}: {what}", path.display())]
    Qcow2 {
        /// The file.
        path: PathBuf,
        /// The problem, and the remedy.
        what: String,
    },
    /// The file's file system does not support direct I/O.
    #[error("path={}: its file system does not support direct=on; leave direct out", .0.display())]
    Direct(PathBuf),
    /// Another program has locked the image.
    #[error(
        "path={}: is in use by another program; stop it, or add readonly=on everywhere if no program writes",
        .0.display()
    )]
    InUse(PathBuf),
    /// The image has changed since it was opened.
    #[error(
        "path={}: has {is} bytes, and had {was} when it was opened; give both hosts the same image", path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// The expected size of the disk, in bytes.
        was: u64,
        /// The size found.
        is: u64,
    },
    /// The file cannot be used for another reason.
    #[error("path={}: cannot {action}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operation.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// There is not enough space to allocate the whole image.
    #[error("path={}: sparse=off: cannot allocate its space: {source}; free some, or leave sparse out", path.display())]
    Space {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The serial number is too long.
    #[error("serial={0}: has more than 20 bytes; shorten it")]
    Serial(String),
    /// The queue size is invalid.
    #[error("queue_size={0}: must be a power of two from 2 to 32768")]
    QueueSize(u16),
    /// No queue was requested.
    #[error("num_queues=0: a disk needs a queue; give 1 or more")]
    NoQueue,
}

impl BlockError {
    /// Class of the error. A faulty image counts as a wrong path, whatever the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Missing(_) => ErrorKind::Missing,
            Self::NotWritable(_)
            | Self::NotReadable(_)
            | Self::Kind { .. }
            | Self::Size { .. }
            | Self::Format { .. }
            | Self::MaybeQcow2 { .. }
            | Self::LikeQcow2 { .. }
            | Self::Qcow2 { .. }
            | Self::Direct(_)
            | Self::Changed { .. }
            | Self::File { .. } => ErrorKind::Unsuitable,
            Self::InUse(_) => ErrorKind::Busy,
            Self::Space { .. } => ErrorKind::Host,
            Self::Serial(_) | Self::QueueSize(_) | Self::NoQueue | Self::Cpus(_) => ErrorKind::Invalid,
        }
    }

    /// The error for a `path` that could not be opened.
    pub(super) fn open(path: &Path, read_only: bool, errno: Errno) -> Self {
        let path = path.to_owned();
        match errno {
            Errno::NOENT => Self::Missing(path),
            Errno::ACCESS | Errno::PERM if read_only => Self::NotReadable(path),
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::NotWritable(path),
            Errno::ISDIR => Self::Kind { path, kind: "directory" },
            Errno::NXIO => Self::Kind { path, kind: "socket or a device without a driver" },
            other => Self::File { path, action: "be opened", source: other.into() },
        }
    }
}

/// Reason why a disk cannot be resized: one line, to follow the requested size.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// The size is not whole blocks.
    #[error("must be a multiple of {0}, and not 0")]
    Size(u32),
    /// The file system or the process does not allow a file of this size.
    #[error("more than a file of this image's file system, or of this process, may have; ask for less")]
    TooLarge,
    /// A qcow2 image only grows.
    #[error("a qcow2 image only grows while the VM runs; shut the VM down and use qemu-img resize --shrink")]
    Shrink,
    /// The image has snapshots of the disk at its old size.
    #[error("the image has {0} snapshots inside; delete them (qemu-img snapshot -d), or convert it")]
    Snapshots(u32),
    /// The backing file's data would appear in the added part.
    #[error(
        "the image is based on one of {0} bytes, whose end would show in the disk; shut the VM down and use qemu-img \
         resize, which hides it"
    )]
    Backing(u64),
    /// No clusters can be reference-counted for a larger table.
    #[error("the image has no room for a larger table; shut the VM down and use qemu-img resize")]
    NoRoom,
    /// A qcow2 image on a block device, whose size is read only once.
    #[error(
        "a qcow2 image on a block device keeps its size while the VM runs; shut the VM down and use qemu-img resize"
    )]
    NotAFile,
    /// The disk is read-only.
    #[error("the disk is read-only and keeps its size; add it without readonly")]
    ReadOnly,
    /// The host's block device has another size.
    #[error("the block device has {0} bytes; give it the new size on the host first, then repeat this")]
    BlockDevice(u64),
    /// Another program has locked the range behind the end of the image.
    #[error("another program has locked what is behind the end of the image; stop it")]
    InUse,
    /// The file system is full.
    #[error("{0}")]
    Space(String),
    /// The host refuses.
    #[error("the host cannot change the size of the image: {0}")]
    Host(io::Error),
    /// The size has changed, but the host cannot restart the queues.
    #[error("the size is changed, but the disk is stopped: {0}; repeat this, or pause and resume the VM")]
    Stopped(io::Error),
}

impl From<Errno> for ResizeError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::FBIG | Errno::INVAL => Self::TooLarge,
            other => Self::Host(other.into()),
        }
    }
}

impl From<io::Error> for ResizeError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Errno::from_raw_os_error(errno).into(),
            None => Self::Host(error),
        }
    }
}

impl ResizeError {
    /// Class of the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Size(_) | Self::TooLarge => ErrorKind::Invalid,
            Self::NotAFile
            | Self::Shrink
            | Self::Snapshots(_)
            | Self::Backing(_)
            | Self::NoRoom
            | Self::ReadOnly
            | Self::BlockDevice(_) => ErrorKind::Unsuitable,
            Self::InUse => ErrorKind::Busy,
            Self::Space(_) | Self::Host(_) | Self::Stopped(_) => ErrorKind::Host,
        }
    }
}
