//! Requests of a driver (`virtio 1.4 §5.13.6`): little-endian messages, read once, with the checks that need no domain.

use vm_memory::Permissions;

use super::mappings::Range;
use super::status::Status;

/// The length of the longest device-readable part: that of PROBE.
pub(crate) const LONGEST: usize = 72;
/// The length of the tail that the device writes last: the status and 3 reserved bytes.
pub(crate) const TAIL: usize = 4;

const ATTACH: u8 = 1;
const DETACH: u8 = 2;
const MAP: u8 = 3;
const UNMAP: u8 = 4;
const PROBE: u8 = 5;

/// The flag of ATTACH that creates a bypass domain.
const BYPASS: u32 = 1;
/// The flags of MAP: readable, writable, not memory.
const READ: u32 = 1;
const WRITE: u32 = 2;
const MMIO: u32 = 4;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Attaches an endpoint to a domain.
    Attach {
        /// The domain, which is created if it does not exist.
        domain: u32,
        /// The endpoint.
        endpoint: u32,
        /// True for a bypass domain: addresses are not translated.
        bypass: bool,
    },
    /// Detaches an endpoint from its domain.
    Detach {
        /// The domain.
        domain: u32,
        /// The endpoint.
        endpoint: u32,
    },
    /// Maps a range of I/O addresses.
    Map {
        /// The domain.
        domain: u32,
        /// The addresses.
        range: Range,
        /// The guest address of the first.
        target: u64,
        /// Allowed accesses.
        access: Permissions,
    },
    /// Removes the mappings in a range.
    Unmap {
        /// The domain.
        domain: u32,
        /// The addresses.
        range: Range,
    },
    /// Reads an endpoint's properties.
    Probe {
        /// The endpoint.
        endpoint: u32,
    },
}

/// The unread fields of a request.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Status> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Status::Invalid)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn number(&mut self) -> Result<u32, Status> {
        self.take().map(u32::from_le_bytes)
    }

    fn address(&mut self) -> Result<u64, Status> {
        self.take().map(u64::from_le_bytes)
    }

    /// Checks that bytes are zero.
    fn reserved<const N: usize>(&mut self) -> Result<(), Status> {
        if self.take::<N>()? == [0; N] { Ok(()) } else { Err(Status::Invalid) }
    }

    fn range(&mut self) -> Result<(u64, u64), Status> {
        Ok((self.address()?, self.address()?))
    }
}

impl Request {
    /// Parses a driver's request.
    ///
    /// # Errors
    ///
    /// The status for the fault.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Status> {
        let mut fields = Fields(bytes);
        let [kind] = fields.take()?;
        if !(ATTACH..=PROBE).contains(&kind) {
            return Err(Status::Unsupported);
        }
        fields.reserved::<3>()?;
        match kind {
            ATTACH => {
                let (domain, endpoint, flags) = (fields.number()?, fields.number()?, fields.number()?);
                fields.reserved::<4>()?;
                let request = Self::Attach { domain, endpoint, bypass: flags & BYPASS != 0 };
                if flags & !BYPASS == 0 { Ok(request) } else { Err(Status::Invalid) }
            }
            DETACH => {
                let (domain, endpoint) = (fields.number()?, fields.number()?);
                fields.reserved::<8>()?;
                Ok(Self::Detach { domain, endpoint })
            }
            MAP => {
                let domain = fields.number()?;
                let range = fields.range()?;
                let (target, flags) = (fields.address()?, fields.number()?);
                // Invalid flags are reported before invalid addresses.
                let access = access(flags)?;
                Ok(Self::Map { domain, range: ordered(range)?, target, access })
            }
            UNMAP => {
                let domain = fields.number()?;
                let range = fields.range()?;
                fields.reserved::<4>()?;
                Ok(Self::Unmap { domain, range: ordered(range)? })
            }
            _ => {
                let endpoint = fields.number()?;
                fields.reserved::<64>()?;
                Ok(Self::Probe { endpoint })
            }
        }
    }
}

fn ordered((first, last): (u64, u64)) -> Result<Range, Status> {
    if first <= last { Ok(Range { first, last }) } else { Err(Status::Range) }
}

fn access(flags: u32) -> Result<Permissions, Status> {
    if flags & !(READ | WRITE | MMIO) != 0 {
        return Err(Status::Invalid);
    }
    // Addresses without memory can be mapped, and fail on access: otherwise a guest whose VFIO maps BARs of other
    // devices could not start its own guest.
    Ok(match (flags & READ != 0, flags & WRITE != 0) {
        (true, true) => Permissions::ReadWrite,
        (true, false) => Permissions::Read,
        (false, true) => Permissions::Write,
        (false, false) => Permissions::No,
    })
}

/// The bytes of `request` from a driver.
#[cfg(test)]
pub(crate) fn encode(request: Request) -> Vec<u8> {
    let le = |number: u32| number.to_le_bytes().to_vec();
    let range = |range: Range| [range.first.to_le_bytes(), range.last.to_le_bytes()].concat();
    let (kind, fields) = match request {
        Request::Attach { domain, endpoint, bypass } => {
            (ATTACH, [le(domain), le(endpoint), le(u32::from(bypass)), le(0)].concat())
        }
        Request::Detach { domain, endpoint } => (DETACH, [le(domain), le(endpoint), vec![0; 8]].concat()),
        Request::Map { domain, range: addresses, target, access } => {
            let flags = u32::from(access.allow(Permissions::Read)) | u32::from(access.allow(Permissions::Write)) << 1;
            (MAP, [le(domain), range(addresses), target.to_le_bytes().to_vec(), le(flags)].concat())
        }
        Request::Unmap { domain, range: addresses } => (UNMAP, [le(domain), range(addresses), le(0)].concat()),
        Request::Probe { endpoint } => (PROBE, [le(endpoint), vec![0; 64]].concat()),
    };
    [vec![kind, 0, 0, 0], fields].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> Vec<Request> {
        let range = Range { first: 0x1000, last: 0x1fff };
        vec![
            Request::Attach { domain: 7, endpoint: 0x108, bypass: true },
            Request::Detach { domain: 7, endpoint: 0x108 },
            Request::Map { domain: 7, range, target: 0x8000, access: Permissions::Write },
            Request::Unmap { domain: 7, range },
            Request::Probe { endpoint: 0x108 },
        ]
    }

    #[test]
    fn requests_have_the_layout_of_the_standard() {
        let lens: Vec<_> = requests().into_iter().map(|request| encode(request).len()).collect();
        assert_eq!(lens, [20, 20, 36, 28, 72]);
        for request in requests() {
            assert_eq!(Request::parse(&encode(request)), Ok(request));
        }
        let map = encode(requests()[2]);
        assert_eq!(
            (&map[..8], &map[24..]),
            (&[3, 0, 0, 0, 7, 0, 0, 0][..], &[0, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0][..])
        );
    }

    #[test]
    fn a_request_that_is_cut_short_or_has_reserved_bits_is_invalid() {
        for request in requests() {
            let bytes = encode(request);
            for len in 0..bytes.len() {
                assert_eq!(Request::parse(&bytes[..len]), Err(Status::Invalid), "{request:?}, {len}");
            }
            let mut reserved = bytes.clone();
            reserved[1] = 1;
            assert_eq!(Request::parse(&reserved), Err(Status::Invalid));
            let mut last = bytes;
            *last.last_mut().unwrap() = 0x80;
            assert_eq!(Request::parse(&last), Err(Status::Invalid), "{request:?}");
        }
    }

    #[test]
    fn unknown_requests_are_unsupported_and_a_reversed_range_fails() {
        for kind in [0, 6, 255] {
            assert_eq!(Request::parse(&[kind, 0, 0, 0]), Err(Status::Unsupported));
        }
        let range = Range { first: 0x2000, last: 0x1fff };
        assert_eq!(Request::parse(&encode(Request::Unmap { domain: 0, range })), Err(Status::Range));
    }
}
