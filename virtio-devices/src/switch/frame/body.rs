//! The part of a frame that the switch has not inspected: all except its first bytes.

use crate::queue::iovecs::IoVecs;

/// The rest of a frame.
#[derive(Clone, Copy)]
pub(crate) enum Body<'b, 's, 'm> {
    /// In its sender's buffers, which the guest may change at any time.
    Guest(&'b IoVecs<'s, 'm>),
    /// In memory of this program.
    Private(&'b [u8]),
}

impl Body<'_, '_, '_> {
    /// Copies all of it, `len` bytes, to `at` of `to`.
    pub(crate) fn copy_to(&self, len: usize, to: &IoVecs<'_, '_>, at: usize) {
        match self {
            Self::Guest(from) => _ = from.copy_at(0, len, to, at),
            Self::Private(from) => _ = to.write_at(at, from.get(..len).unwrap_or(from)),
        }
    }

    /// Reads its beginning. Behind its end are zeros.
    pub(crate) fn read(&self, data: &mut [u8]) {
        let len = match self {
            Self::Guest(from) => from.read_at(0, data),
            Self::Private(from) => {
                data.iter_mut().zip(*from).for_each(|(to, from)| *to = *from);
                from.len()
            }
        };
        data.get_mut(len..).unwrap_or_default().fill(0);
    }
}
