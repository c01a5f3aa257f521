//! Options for opening an image.

/// The format that an image is said to have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImageFormat {
    /// Raw, unless it begins with another format's signature, which is refused: a guest can write such a beginning.
    #[default]
    Unknown,
    /// Raw, whatever it begins with.
    Raw,
    /// QEMU's qcow2.
    Qcow2 {
        /// True if it may name a backing file, which is then opened, too.
        backing_files: bool,
    },
}

/// Options for opening an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    /// It is not written.
    pub read_only: bool,
    /// It is read and written around the page cache.
    pub direct: bool,
    /// Format of the image.
    pub format: ImageFormat,
    /// Space that is not needed is given back. Otherwise all space of a raw file is allocated when it is opened.
    pub sparse: bool,
    /// The part of it that is locked.
    pub lock: LockGranularity,
}

/// Range of an image that a disk locks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LockGranularity {
    /// The bytes that the image has.
    #[default]
    ByteRange,
    /// The whole file, whatever its size becomes.
    Full,
}
