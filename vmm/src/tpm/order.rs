//! The orders of a TPM's thread.

/// What the worker is to do.
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
