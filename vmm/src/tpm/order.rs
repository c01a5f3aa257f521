//! Requests to the TPM's thread.

/// Request to the worker.
#[derive(Debug, Default)]
pub(super) enum Order {
    /// No request.
    #[default]
    None,
    /// Execute this command.
    Command(Vec<u8>),
    /// Reset the TPM.
    Reset,
    /// Exit.
    End,
}
