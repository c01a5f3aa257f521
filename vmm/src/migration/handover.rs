//! Handover of the guest: both sides of a live migration as pure state machines, from events to actions.
//!
//! ```text
//! source                       target
//!   greeting ─────────────────▶
//!            ◀───────────────── greeting
//!   Offer    ─────────────────▶ makes its VM, opens and checks every backend
//!            ◀───────────────── Prepared
//!   Pages …  ─────────────────▶ while the guest runs
//!   (the guest is paused)
//!   Pages, State ─────────────▶ loads all
//!            ◀───────────────── Ready
//!   (flushes disks, drops its locks)
//!   Go       ─────────────────▶ takes the locks, then runs the guest
//!            ◀───────────────── Running
//! ```
//!
//! - After a failure on either side before Go, the source resumes the guest with its backends, locks and logs
//!   unchanged. The target takes no lock before Go, so that only a third program can keep the source from taking its
//!   locks back; then the guest stays paused, and an error says so.
//! - The target runs the guest only after Go. A target that sends Failed has discarded the guest and never runs it.
//! - After Go the source never resumes the guest by itself: without a reply the guest stays paused there, and an event
//!   reports that its owner is unknown ([`Outcome::Unknown`]). A user may check the target and force the source, which
//!   still runs nothing without its locks.
//!
//! Phases that wait have a deadline ([`source::Phase::deadline`], [`target::Phase::deadline`]); the migration threads
//! report its end as `TimedOut`.

#[cfg(test)]
mod model;
pub mod source;
pub mod target;

/// Outcome of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The target runs the guest.
    Finished,
    /// The migration failed; the source has the guest.
    Failed,
    /// A user cancelled the migration; the source has the guest.
    Cancelled,
    /// The guest powered off during the migration.
    GuestOff,
    /// Go was sent, and no reply arrived. The guest is paused at the source.
    Unknown,
    /// As [`Self::Unknown`], until a user forced the source to resume.
    Forced,
}

impl Outcome {
    /// Name in events and in the progress.
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
