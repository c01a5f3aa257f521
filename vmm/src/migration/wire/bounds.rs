//! Bounds of the protocol: versions, and lengths of a peer's data.

/// First bytes of each connection.
pub const MAGIC: [u8; 8] = *b"sriovmig";
/// Newest protocol version that this program supports.
pub const VERSION: u16 = 1;
/// Oldest protocol version that this program supports.
pub const OLDEST: u16 = 1;
/// Length of a greeting, in bytes.
pub const GREETING: usize = 40;
/// Length of a frame header, in bytes.
pub const HEADER: usize = 8;
/// Limit on a document part, in bytes.
pub const MAX_PART: usize = 64 << 10;
/// Limit on a document, in bytes: the state of a machine with the maximum number of VFs.
pub const MAX_DOCUMENT: usize = 64 << 20;
/// Limit on an offer, in bytes: the longest configuration of a client, with the slots of its devices.
pub const MAX_OFFER: usize = 8 << 20;
/// Limit on a line of text, in bytes.
pub const MAX_LINE: usize = 1024;
/// Limit on the ranges of a frame of pages.
pub const MAX_RANGES: usize = 1024;
/// Limit on the page bytes of a frame.
pub const MAX_DATA: usize = 2 << 20;
/// Limit on connections for pages, as in Cloud Hypervisor.
pub const MAX_CONNECTIONS: u8 = 128;
/// Size of a page, in bytes.
pub const PAGE: u64 = 4096;
/// Length of a table entry in a frame of pages, in bytes.
pub(super) const RANGE: usize = 16;
/// Length of the count before the table, in bytes.
pub(super) const TABLE: usize = 8;
/// Limit on a frame's body without page bytes.
pub const MAX_BODY: usize = MAX_PART + 1;
