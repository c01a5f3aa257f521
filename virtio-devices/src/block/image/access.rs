//! Options for opening an image.

/// The configured format of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImageFormat {
    /// Raw. An image with another format's signature is refused, because a guest can write such a signature.
    #[default]
    Unknown,
    /// Raw, whatever its first bytes are.
    Raw,
    /// QEMU's qcow2.
    Qcow2 {
        /// True if the image may name a backing file, which is then opened, too.
        backing_files: bool,
    },
}

/// Options for opening an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    /// True if the image is not written.
    pub read_only: bool,
    /// True if I/O bypasses the page cache.
    pub direct: bool,
    /// Format of the image.
    pub format: ImageFormat,
    /// True if unused space is freed. Otherwise all space of a raw file is allocated on opening.
    pub sparse: bool,
    /// The part of the image that is locked.
    pub lock: LockGranularity,
}

/// Range of an image that a disk locks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LockGranularity {
    /// The bytes of the image.
    #[default]
    ByteRange,
    /// The whole file, including space that is added later.
    Full,
}
