//! The TPM: `--tpm`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

/// A TPM 2.0, backed by swtpm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--tpm")]
pub struct TpmConfig {
    /// Unix socket that swtpm listens on for control (--ctrl type=unixio).
    #[option("socket=<path>", bare, required)]
    #[schema(limits = SOCKET)]
    pub socket: PathBuf,
}
