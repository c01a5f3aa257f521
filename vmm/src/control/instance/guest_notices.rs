//! Notices to the guest about changes of its VFs.

use vm_api::channel::Notice;

use super::Instance;

impl Instance {
    /// Queues a notice for the guest, if it has a channel.
    pub(super) fn notify_guest(&self, notice: Notice) {
        log::debug!("{}: {} by {}", notice.vf, notice.changed, notice.by);
    }
}
