//! Handover of the guest: both sides of a live migration as pure state machines, from events to actions.
//!
//! ```text
//! source                       target
//!   greeting ─────────────────▶
//!            ◀───────────────── greeting
//!   Offer    ─────────────────▶ makes its VM, opens and checks every backend
//!            ◀───────────────── Prepared
//!   Pages …  ─────────────────▶ while the guest runs
//!   (the guest stands still)
//!   Pages, State ─────────────▶ loads all
//!            ◀───────────────── Ready
//!   (flushes disks, drops its locks)
//!   Go       ─────────────────▶ takes the locks, then runs the guest
//!            ◀───────────────── Running
//! ```
//!
//! - Before Go, whatever fails on either side, the source goes on with the guest, with its backends, locks and logs as
//!   they were. The target takes no lock before Go, so that only a third program can keep the source from taking its
//!   locks again; then the guest stays paused, and an error says so.
//! - The target runs the guest only after Go. A target that says Failed has discarded the guest and never runs it.
//! - After Go the source never goes on by itself: if no answer comes, the guest stands still there, and an event says
//!   that it is unknown who has it ([`Outcome::Unknown`]). A user may look at the target, and force the source, which
//!   still lets nothing run without its locks.
//!
//! Stages that wait have a deadline ([`sender::Stage::deadline`], [`receiver::Stage::deadline`]); the drivers of these
//! machines report its end as `Late`.

#[cfg(test)]
mod model;
pub mod receiver;
pub mod sender;

/// Result of a migration; it may be unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The target runs the guest.
    Finished,
    /// It failed; the source has the guest.
    Failed,
    /// A user ended it; the source has the guest.
    Cancelled,
    /// The guest powered off meanwhile.
    GuestOff,
    /// Go was sent, and no answer came. The source has the guest standing still.
    Unknown,
    /// As [`Self::Unknown`], until a user forced the source to go on.
    Forced,
}

impl Outcome {
    /// Word for it in events and in the progress.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::GuestOff => "guest-shut-down",
            Self::Unknown => "unknown",
            Self::Forced => "forced",
        }
    }
}
