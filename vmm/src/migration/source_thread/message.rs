//! Messages to the source's thread.

use crate::dirty::DirtyLog;
use crate::machine_state::backend_state::BackendState;
use crate::migration::commands::SourceReply;
use crate::migration::control_channel::PeerMessage;
use crate::migration::transport::{Route, Stream};

/// Message to the source's thread, from the control thread, the target, or a background thread.
pub(super) enum SourceMessage {
    /// Reply of the control thread.
    Control(SourceReply),
    /// Message of the target.
    Target(PeerMessage),
    /// Address and control connection of the target, or the reason for a failure.
    Connected(Result<(Route, Stream), String>),
    /// Connections for pages.
    PageConnections(Result<Vec<Stream>, String>),
    /// Connection that descriptors were passed on.
    DescriptorsPassed(Result<Stream, String>),
    /// Dirty log, which is on, or the reason for a failure.
    LogStarted(Result<DirtyLog, String>),
    /// Bytes that a connection has sent in a pass.
    PassSent(Result<u64, String>),
    /// Result of flushing the guest's writes to its disks.
    DisksFlushed(Result<(), String>),
    /// State of backends besides their queues, or the reason for a failure.
    BackendsSaved(Result<Vec<BackendState>, String>),
    /// Result of releasing the disk locks.
    LocksReleased(Result<(), String>),
    /// Result of taking the disk locks back.
    LocksTaken(Result<(), String>),
}

/// Background threads of the source.
pub(super) type Tasks = crate::migration::background_tasks::BackgroundTasks<SourceMessage>;
