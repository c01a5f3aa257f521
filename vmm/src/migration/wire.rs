//! The frames of a live migration, as bytes.
//!
//! Each connection begins with a [`Greeting`]; then frames follow, each a [`Header`] and a body. The first connection
//! carries what both sides say to each other, and the state; the others carry pages. All numbers are little-endian.
//!
//! A peer is not trusted: each kind of frame has a bound, so that no number of a peer's sizes an allocation. What is
//! longer, a document, comes in parts and grows only by bytes that have arrived.

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
