//! Requests of the guest about its VFs.

use serde_json::Value;
use vm_api::channel::{Command, Refusal, RefusalCode};

use super::Instance;

impl Instance {
    /// Carries out a request of the guest.
    ///
    /// # Errors
    ///
    /// Fails without a change.
    pub(super) fn guest_request(&mut self, _command: Command) -> Result<Value, Refusal> {
        Err(Refusal { code: RefusalCode::Failed, message: "this VMM carries out no requests yet".to_string() })
    }
}
