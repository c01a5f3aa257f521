//! A call on an image: one system call, or one entry of an io_uring.

use rustix::fs::FallocateFlags;

use super::operation::Range;

/// Work of a single system call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call<'c> {
    /// Reads into segments, from this offset on.
    Read(&'c [libc::iovec], u64),
    /// Writes segments, starting at this offset; `stable` means to the medium.
    Write {
        /// Buffers with the data.
        iovecs: &'c [libc::iovec],
        /// Offset in the file.
        offset: u64,
        /// True if the data must be on the medium when the call is done.
        stable: bool,
    },
    /// Flushes written data to the medium.
    Sync,
    /// Zeroes a range, and frees its space if `unmap`.
    Zero {
        /// Range that becomes zero.
        range: Range,
        /// True if the space of the range may be freed.
        unmap: bool,
    },
}

impl<'c> Call<'c> {
    /// The same call, limited to its beginning if it is a transfer: the whole segments of at most `bytes` bytes
    /// together, or that much of the first one, which then goes to `part`.
    pub(crate) fn beginning(self, bytes: usize, part: &'c mut [libc::iovec; 1]) -> Self {
        match self {
            Self::Read(iovecs, offset) => Self::Read(beginning(iovecs, bytes, part), offset),
            Self::Write { iovecs, offset, stable } => {
                Self::Write { iovecs: beginning(iovecs, bytes, part), offset, stable }
            }
            other => other,
        }
    }

    /// Number of bytes that the call transfers.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Read(iovecs, _) | Self::Write { iovecs, .. } => iovecs.iter().map(|segment| segment.iov_len).sum(),
            Self::Sync | Self::Zero { .. } => 0,
        }
    }
}

fn beginning<'c>(iovecs: &'c [libc::iovec], bytes: usize, part: &'c mut [libc::iovec; 1]) -> &'c [libc::iovec] {
    let mut rest = bytes;
    let fits = |segment: &&libc::iovec| rest.checked_sub(segment.iov_len).inspect(|left| rest = *left).is_some();
    match (iovecs.iter().take_while(fits).count(), iovecs.first()) {
        (0, Some(first)) => {
            *part = [libc::iovec { iov_base: first.iov_base, iov_len: bytes }];
            part
        }
        (whole, _) => iovecs.get(..whole).unwrap_or_default(),
    }
}

/// Flags that zero a range of a file: with a hole, or with its space kept.
pub(crate) fn zeroing(unmap: bool) -> FallocateFlags {
    FallocateFlags::KEEP_SIZE | if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_begins_with_whole_segments_or_a_part_of_the_first() {
        let segment = |iov_len| libc::iovec { iov_base: std::ptr::dangling_mut::<u8>().cast(), iov_len };
        let beginning = |lens: &[usize], bytes| {
            let (iovecs, mut part) = (lens.iter().copied().map(segment).collect::<Vec<_>>(), [segment(0)]);
            match (Call::Write { iovecs: &iovecs, offset: 512, stable: true }).beginning(bytes, &mut part) {
                Call::Write { iovecs, offset: 512, stable: true } => {
                    iovecs.iter().map(|segment| segment.iov_len).collect::<Vec<_>>()
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(beginning(&[512, 0, 512, 512], 1024), [512, 0, 512]);
        assert_eq!(beginning(&[512, 4096], 1024), [512]);
        assert_eq!(beginning(&[4096, 512], 1024), [1024]);
        assert_eq!(beginning(&[512, 512], 1 << 20), [512, 512]);
        assert!(beginning(&[], 1024).is_empty());
    }
}
