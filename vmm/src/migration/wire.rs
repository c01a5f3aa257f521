//! Frames of a migration, as bytes.
//!
//! A connection starts with a [`Greeting`]; frames follow, each a [`Header`] and a body. The first connection carries
//! messages and state; the others carry pages. All numbers are little-endian.
//!
//! Peers are not trusted: each kind of frame has a size limit, so that no number of a peer sizes an allocation.
//! Documents, which are longer, arrive in parts and grow only by bytes that have arrived.

mod bounds;
mod document;
mod error;
mod frame;
mod pages;
#[cfg(test)]
mod tests;

pub use bounds::{
    GREETING, HEADER, MAGIC, MAX_BODY, MAX_CONNECTIONS, MAX_DATA, MAX_DOCUMENT, MAX_LINE, MAX_OFFER, MAX_PART,
    MAX_RANGES, OLDEST, PAGE, VERSION,
};
pub use document::{Document, Part, parts};
pub use error::WireError;
pub use frame::{Features, Frame, Greeting, Header, Kind, Role};
pub use pages::{Pages, Range};
