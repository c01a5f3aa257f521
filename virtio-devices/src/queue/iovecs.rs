//! Guest memory as the segments of one vectored system call, without copying.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

use super::ring::{Chain, Descriptor};
use crate::DmaView;
use crate::memory::effort;

/// The most segments of guest memory in one call. Linux accepts 1,024 (`UIO_MAXIOV`): one is a frame's header, one is
/// for spilled bytes. A longer chain is refused; drivers use some 20 segments at most.
pub(crate) const MAX_SEGMENTS: usize = 1022;

/// The first iovec is reserved for a header that is not in guest memory.
const RESERVED: usize = 1;

/// A chain that is not a valid buffer: empty, endless, with an address outside guest memory, in the wrong direction or
/// in more than [`MAX_SEGMENTS`] pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadChain;

/// The storage of [`IoVecs`], reused for each chain: no packet allocates.
#[derive(Default)]
pub(crate) struct Storage(Vec<libc::iovec>);

/// Segments of guest memory, in order.
///
/// The addresses stay valid while the memory is borrowed. Guest memory is shared with the guest, so it is only ever
/// read and written through volatile accesses and system calls.
pub(crate) struct IoVecs<'s, 'm> {
    iovecs: &'s mut Vec<libc::iovec>,
    /// The first segment that has not been consumed.
    first: usize,
    /// The memory of the segments; `None` before there are any.
    memory: Option<&'m DmaView>,
    /// The descriptors and further pieces of their buffers that were read since the last query.
    walked: usize,
}

impl<'s, 'm> IoVecs<'s, 'm> {
    /// No segments yet.
    pub(crate) fn new(storage: &'s mut Storage) -> Self {
        let iovecs = &mut storage.0;
        iovecs.clear();
        iovecs.push(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });
        Self { iovecs, first: RESERVED, memory: None, walked: 0 }
    }

    /// Appends the chain's segments, which must all have the direction of `access`, and returns their number and
    /// length. A refused chain appends nothing.
    pub(crate) fn append(
        &mut self,
        memory: &'m DmaView,
        chain: Chain<'m>,
        access: Permissions,
    ) -> Result<Extent, BadChain> {
        self.append_within(memory, chain, access, Bounds { pieces: MAX_SEGMENTS, enough: usize::MAX })
    }

    /// The same for a chain within `bounds`. Descriptors after `enough` bytes are not read.
    pub(crate) fn append_within(
        &mut self,
        memory: &'m DmaView,
        chain: Chain<'m>,
        access: Permissions,
        bounds: Bounds,
    ) -> Result<Extent, BadChain> {
        let mark = self.iovecs.len();
        let result = self.append_all(memory, chain, access, bounds);
        if result.is_err() {
            self.iovecs.truncate(mark);
        }
        result
    }

    /// The descriptors and further pieces looked up since [`Self::take_walked`], also those of refused chains.
    pub(crate) fn walked(&self) -> usize {
        self.walked
    }

    /// Returns the number of descriptors and further pieces looked up since the last call.
    pub(crate) fn take_walked(&mut self) -> usize {
        std::mem::take(&mut self.walked)
    }

    fn append_all(
        &mut self,
        memory: &'m DmaView,
        chain: Chain<'m>,
        access: Permissions,
        bounds: Bounds,
    ) -> Result<Extent, BadChain> {
        let mut total = Extent { segments: 0, bytes: 0 };
        let mut unfinished = true;
        let until = self.walked + bounds.pieces.min(MAX_SEGMENTS);
        // An endless chain ends here too: each descriptor counts, even if empty.
        for descriptor in chain {
            self.walked += 1;
            if descriptor.is_write_only() != access.has_write() || self.walked > until {
                return Err(BadChain);
            }
            let room = bounds.enough.saturating_sub(total.bytes);
            let Extent { segments, bytes } = self.push(memory, descriptor, access, (until, room))?;
            total.segments += segments;
            total.bytes += bytes;
            if total.bytes >= bounds.enough {
                return Ok(total);
            }
            unfinished = descriptor.has_next();
        }
        // The iterator ends silently if it cannot follow a chain.
        if unfinished { Err(BadChain) } else { Ok(total) }
    }

    /// Appends a descriptor's segments, until `bounds.1` bytes of it are appended, or `bounds.0` pieces were walked.
    #[inline]
    fn push(
        &mut self,
        memory: &'m DmaView,
        descriptor: Descriptor,
        access: Permissions,
        bounds: (usize, usize),
    ) -> Result<Extent, BadChain> {
        let len = usize::try_from(descriptor.len()).map_err(|_| BadChain)?;
        if len == 0 {
            return Ok(Extent { segments: 0, bytes: 0 });
        }
        match memory.host(descriptor.address(), len) {
            Some(host) => {
                self.push_segment(memory, host, len)?;
                Ok(Extent { segments: 1, bytes: len })
            }
            None => self.push_pieces(memory, (descriptor.address(), len), access, bounds),
        }
    }

    /// The same for a buffer that is translated, or in several regions.
    #[cold]
    fn push_pieces(
        &mut self,
        memory: &'m DmaView,
        (address, len): (u64, usize),
        access: Permissions,
        (until, enough): (usize, usize),
    ) -> Result<Extent, BadChain> {
        let mut extent = Extent { segments: 0, bytes: 0 };
        let slices = GuestMemory::get_slices(memory, GuestAddress(address), len, access).map_err(|_| BadChain)?;
        for (number, slice) in slices.enumerate() {
            // The first piece is the descriptor's own. Each further one costs a look-up, so a single descriptor may
            // cost as much as many.
            self.walked += usize::from(number > 0);
            if self.walked > until {
                return Err(BadChain);
            }
            let slice = slice.map_err(|_| BadChain)?;
            self.push_segment(memory, slice.ptr_guard_mut().as_ptr(), slice.len())?;
            extent.segments += 1;
            extent.bytes += slice.len();
            if extent.bytes >= enough {
                break;
            }
        }
        Ok(extent)
    }

    #[inline]
    fn push_segment(&mut self, memory: &'m DmaView, host: *mut u8, len: usize) -> Result<(), BadChain> {
        if self.iovecs.len() - self.first == MAX_SEGMENTS {
            return Err(BadChain);
        }
        self.memory = Some(memory);
        self.iovecs.push(libc::iovec { iov_base: host.cast(), iov_len: len });
        Ok(())
    }

    /// The sum of the segments' lengths.
    pub(crate) fn bytes(&self) -> usize {
        self.iovecs[self.first..].iter().map(|iovec| iovec.iov_len).sum()
    }

    /// Drops the last `segments` segments.
    pub(crate) fn remove_back(&mut self, segments: usize) {
        let rest = self.iovecs.len().saturating_sub(segments).max(self.first);
        self.iovecs.truncate(rest);
    }

    /// Drops the first `segments` segments.
    pub(crate) fn consume(&mut self, segments: usize) {
        self.first += segments.min(self.iovecs.len() - self.first);
        // Consumed segments are only removed once there are many, which keeps the storage small and this cheap.
        if self.first > MAX_SEGMENTS {
            self.iovecs.drain(RESERVED..self.first);
            self.first = RESERVED;
        }
    }

    /// Forgets all segments.
    pub(crate) fn clear(&mut self) {
        self.iovecs.truncate(RESERVED);
        self.first = RESERVED;
    }

    /// The segments, for a system call. The addresses are those of guest memory: the guest may see what the kernel
    /// writes there at once.
    pub(crate) fn segments(&self) -> &[libc::iovec] {
        &self.iovecs[self.first..]
    }

    /// Moves the first bytes into `data`. Returns false if there are fewer.
    pub(crate) fn take_front(&mut self, data: &mut [u8]) -> bool {
        if self.read_at(0, data) < data.len() {
            return false;
        }
        self.advance(data.len());
        true
    }

    /// Drops the first `bytes` bytes.
    pub(crate) fn advance(&mut self, bytes: usize) {
        let mut rest = bytes;
        while let Some(iovec) = self.iovecs.get_mut(self.first) {
            let part = rest.min(iovec.iov_len);
            iovec.iov_base = iovec.iov_base.cast::<u8>().wrapping_add(part).cast();
            iovec.iov_len -= part;
            rest -= part;
            if iovec.iov_len != 0 {
                break;
            }
            self.first += 1;
        }
    }

    /// Moves the first `bytes` bytes, or as many as there are, to the end of `to`. The caller limits the number of
    /// segments there.
    pub(crate) fn move_front(&mut self, bytes: usize, to: &mut IoVecs<'_, 'm>) {
        let mut rest = bytes;
        for iovec in &self.iovecs[self.first..] {
            if rest == 0 {
                break;
            }
            let part = rest.min(iovec.iov_len);
            to.memory = self.memory;
            to.iovecs.push(libc::iovec { iov_base: iovec.iov_base, iov_len: part });
            rest -= part;
        }
        self.advance(bytes);
    }

    /// Removes the last byte; `None` if there is none.
    pub(crate) fn take_last(&mut self) -> Option<Byte<'m>> {
        while self.iovecs.len() > self.first {
            let iovec = self.iovecs.last_mut()?;
            let Some(rest) = iovec.iov_len.checked_sub(1) else {
                self.iovecs.pop();
                continue;
            };
            iovec.iov_len = rest;
            // SAFETY: the iovec is a slice of guest memory, which stays mapped as long as `'m`; this was its last byte.
            let slice = unsafe { VolatileSlice::new(iovec.iov_base.cast::<u8>().add(rest), 1) };
            return Some(Byte { slice, memory: self.memory? });
        }
        None
    }

    /// Drops everything beyond the first `bytes` bytes.
    pub(crate) fn truncate(&mut self, bytes: usize) {
        let mut rest = bytes;
        let mut keep = self.first;
        for iovec in &mut self.iovecs[self.first..] {
            if rest == 0 {
                break;
            }
            iovec.iov_len = iovec.iov_len.min(rest);
            rest -= iovec.iov_len;
            keep += 1;
        }
        self.iovecs.truncate(keep);
    }

    /// Reads at `offset`, and returns the number of bytes read.
    pub(crate) fn read_at(&self, offset: usize, data: &mut [u8]) -> usize {
        effort::bytes(data.len());
        let mut done = 0;
        self.for_each_at(offset, data.len(), |slice| {
            done += slice.read(&mut data[done..], 0).unwrap_or(0);
        });
        done
    }

    /// Writes at `offset`, and returns the number of bytes written.
    pub(crate) fn write_at(&self, offset: usize, data: &[u8]) -> usize {
        effort::bytes(data.len());
        let mut done = 0;
        self.for_each_at(offset, data.len(), |slice| {
            done += slice.write(&data[done..], 0).unwrap_or(0);
            self.note_slice(&slice);
        });
        done
    }

    /// Copies the `len` bytes at `offset` to `at` of `to`, and returns the number of bytes copied.
    pub(crate) fn copy_at(&self, offset: usize, len: usize, to: &IoVecs<'_, '_>, at: usize) -> usize {
        effort::bytes(len);
        let (mut done, mut room) = (0, to.cursor(at));
        self.for_each_at(offset, len, |from| {
            let mut part = 0;
            while part < from.len()
                && let Some(slice) = room.next(from.len() - part)
                && let Ok(from) = from.subslice(part, slice.len())
            {
                part += slice.len();
                from.copy_to_volatile_slice(slice);
                to.note_slice(&slice);
            }
            done += part;
        });
        done
    }

    /// Zeroes the first `bytes` bytes, or as many as there are.
    pub(crate) fn zero_front(&self, bytes: usize) {
        const ZEROES: [u8; 4096] = [0; 4096];
        self.for_each_at(0, bytes, |slice| {
            for start in (0..slice.len()).step_by(ZEROES.len()) {
                // Writes as much as the slice has room for.
                let _ = slice.write(&ZEROES, start);
            }
            self.note_slice(&slice);
        });
    }

    /// Marks the first `bytes` bytes, or as many as there are, as written by a system call.
    pub(crate) fn note_written(&self, bytes: usize) {
        let Some(memory) = self.memory.filter(|memory| memory.is_logged()) else { return };
        let mut rest = bytes;
        for iovec in &self.iovecs[self.first..] {
            if rest == 0 {
                break;
            }
            let part = rest.min(iovec.iov_len);
            memory.note_written(iovec.iov_base.cast::<u8>(), part);
            rest -= part;
        }
    }

    /// Marks a slice of a segment as written.
    fn note_slice(&self, slice: &VolatileSlice<'_>) {
        if let Some(memory) = self.memory {
            memory.note_written(slice.ptr_guard().as_ptr(), slice.len());
        }
    }

    /// Calls `access` with each piece of the `len` bytes at `offset`.
    #[inline]
    fn for_each_at(&self, offset: usize, mut len: usize, mut access: impl FnMut(VolatileSlice<'_>)) {
        let mut cursor = self.cursor(offset);
        while let Some(slice) = cursor.next(len) {
            len -= slice.len();
            access(slice);
        }
    }

    /// The bytes from `offset` on.
    #[inline]
    fn cursor(&self, offset: usize) -> Cursor<'_> {
        Cursor {
            iovecs: self.segments().iter(),
            rest: libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
            skip: offset,
        }
    }

    /// Writes `header` and then all segments to `fd` in one call.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, header: &[u8]) -> io::Result<usize> {
        // One always precedes the first: the reserved one, or a consumed one.
        let start = self.first - RESERVED;
        self.iovecs[start] = libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
        let iovecs = &self.iovecs[start..];
        let count = libc::c_int::try_from(iovecs.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the kernel reads `header`, which lives through the call, and guest memory that stays mapped as long
        // as `'m`.
        let sent = unsafe { libc::writev(fd.as_raw_fd(), iovecs.as_ptr(), count) };
        self.iovecs[start] = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Writes all segments to the socket `fd` in one call, without waiting, and without a signal if the peer has
    /// disconnected.
    pub(crate) fn send_to_socket(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let iovecs = &self.iovecs[self.first..];
        // SAFETY: a message of zeros has no address, segments or control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = iovecs.as_ptr().cast_mut();
        message.msg_iovlen = iovecs.len();
        // SAFETY: the kernel reads guest memory that stays mapped as long as `'m`, and does not write to the segments.
        let sent =
            unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Reads from `fd` in one call into all segments, and the excess into `spill`.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>, spill: &mut [u8]) -> io::Result<usize> {
        self.iovecs.push(libc::iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() });
        let iovecs = &self.iovecs[self.first..];
        let received = match libc::c_int::try_from(iovecs.len()) {
            // SAFETY: the kernel writes to `spill`, which is borrowed through the call, and to guest memory that stays
            // mapped as long as `'m` and that no Rust reference covers.
            Ok(count) => unsafe { libc::readv(fd.as_raw_fd(), iovecs.as_ptr(), count) },
            Err(_) => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let result = usize::try_from(received).map_err(|_| io::Error::last_os_error());
        self.iovecs.pop();
        self.note_written(*result.as_ref().unwrap_or(&0));
        result
    }
}

/// The bytes of segments, in order.
struct Cursor<'i> {
    /// The segments that have not been started.
    iovecs: std::slice::Iter<'i, libc::iovec>,
    /// Rest of a partly consumed segment.
    rest: libc::iovec,
    /// Bytes to skip first.
    skip: usize,
}

impl<'i> Cursor<'i> {
    /// The next contiguous bytes, at least one and at most `len`.
    #[inline]
    fn next(&mut self, len: usize) -> Option<VolatileSlice<'i>> {
        if len == 0 {
            return None;
        }
        while self.rest.iov_len <= self.skip {
            self.skip -= self.rest.iov_len;
            self.rest = *self.iovecs.next()?;
        }
        let begin = self.rest.iov_base.cast::<u8>().wrapping_add(self.skip);
        let (left, part) = (self.rest.iov_len - self.skip, len.min(self.rest.iov_len - self.skip));
        self.skip = 0;
        self.rest = libc::iovec { iov_base: begin.wrapping_add(part).cast(), iov_len: left - part };
        // SAFETY: the iovec is a slice of guest memory, or its end, which stays mapped as long as the segments; the
        // part lies in it.
        Some(unsafe { VolatileSlice::new(begin, part) })
    }
}

/// A byte of guest memory for the device to write.
pub(crate) struct Byte<'m> {
    slice: VolatileSlice<'m>,
    memory: &'m DmaView,
}

impl Byte<'_> {
    /// Writes `value` to the byte.
    pub(crate) fn write(&self, value: u8) {
        // Cannot fail: the slice is one byte of guest memory.
        let _ = self.slice.write_obj(value, 0);
        self.memory.note_written(self.slice.ptr_guard().as_ptr(), 1);
    }
}

/// Divides a chain into its device-readable and device-writable parts, in this order (`virtio 1.4 §2.7.4.2`).
///
/// # Errors
///
/// [`BadChain`], with the parts that could be resolved.
pub(crate) fn divide<'m>(
    memory: &'m DmaView,
    chain: Chain<'m>,
    readable: &mut IoVecs<'_, 'm>,
    writable: &mut IoVecs<'_, 'm>,
) -> Result<(), BadChain> {
    let mut result = Ok(());
    let mut unfinished = true;
    let mut seen_writable = false;
    for descriptor in chain.take(MAX_SEGMENTS) {
        let pushed = if descriptor.is_write_only() {
            seen_writable = true;
            writable.push(memory, descriptor, Permissions::Write, (usize::MAX, usize::MAX))
        } else if seen_writable {
            Err(BadChain)
        } else {
            readable.push(memory, descriptor, Permissions::Read, (usize::MAX, usize::MAX))
        };
        result = result.and(pushed.map(|_| ()));
        unfinished = descriptor.has_next();
    }
    if unfinished { Err(BadChain) } else { result }
}

/// The limits for reading a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// The most descriptors and further pieces of their buffers: a longer chain is refused.
    pub pieces: usize,
    /// The bytes after which no further pieces are looked up.
    pub enough: usize,
}

/// Size of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    /// The number of its segments.
    pub segments: usize,
    /// The sum of their lengths.
    pub bytes: usize,
}
