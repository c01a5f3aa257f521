//! Messages to the target's thread.

use super::listening::Connected;
use super::preparer::PreparedVm;
use crate::migration::commands::TargetReply;
use crate::migration::control_channel::PeerMessage;

/// Message to the target's thread, from the control thread, the source, or a background thread.
pub(super) enum TargetMessage {
    /// Reply of the control thread.
    Control(TargetReply),
    /// Message of the source.
    Source(PeerMessage),
    /// A connection of the source.
    Connected(Connected),
    /// The created VM.
    Prepared(Result<Box<PreparedVm>, String>),
    /// Result of receiving a further pass on a connection.
    PassReceived(Result<(), String>),
    /// Result of loading backend states.
    BackendsLoaded(Result<(), String>),
    /// Result of taking the disk locks; after a failure none is held.
    LocksTaken(Result<(), String>),
}

/// Background threads of the target.
pub(super) type Tasks = crate::migration::background_tasks::BackgroundTasks<TargetMessage>;
