//! The bounds of the protocol: versions, and the lengths of what a peer may send.

/// The first bytes of each connection.
pub const MAGIC: [u8; 8] = *b"sriovmig";
/// The newest version of this protocol that this program speaks.
pub const VERSION: u16 = 1;
/// The oldest.
pub const OLDEST: u16 = 1;
/// The length of a greeting, in bytes.
pub const GREETING: usize = 40;
/// The length of a frame's header, in bytes.
pub const HEADER: usize = 8;
/// The longest part of a document, in bytes.
pub const MAX_PART: usize = 64 << 10;
/// The longest document, in bytes: a configuration, or the state of a machine with all the VFs that there may be.
pub const MAX_DOCUMENT: usize = 64 << 20;
/// The longest offer, in bytes: as much as a configuration that a client may give, and where its devices are.
pub const MAX_OFFER: usize = 8 << 20;
/// The longest line of text, in bytes.
pub const MAX_LINE: usize = 1024;
/// The most ranges of one frame of pages.
pub const MAX_RANGES: usize = 1024;
/// The most bytes of pages of one frame.
pub const MAX_DATA: usize = 2 << 20;
/// The most connections beside the first, as in Cloud Hypervisor.
pub const MAX_CONNECTIONS: u8 = 128;
/// The bytes of a page.
pub const PAGE: u64 = 4096;
/// The length of a range in the table of a frame of pages, in bytes.
pub(super) const RANGE: usize = 16;
/// The length of what is before that table, in bytes.
pub(super) const TABLE: usize = 8;
/// The longest body of a frame but for the bytes of pages.
pub const MAX_BODY: usize = MAX_PART + 1;
