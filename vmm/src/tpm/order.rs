//! The orders of a TPM's thread.

/// Orders to the worker.
#[derive(Debug, Default)]
pub(super) enum Order {
    /// Nothing.
    #[default]
    None,
    /// To carry out this command.
    Command(Vec<u8>),
    /// To reset the TPM.
    Reset,
    /// To end.
    End,
}
