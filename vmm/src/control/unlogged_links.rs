//! Links that are taken down while their VM is sent: `on_unlogged_backend=link-down`.

use crate::control::ControlLoop;
use crate::control::instance::Instance;
use crate::dirty::DirtySource;

impl ControlLoop {
    /// Collects the dirty-page sources. With on_unlogged_backend=link-down, stops the backends that have no dirty log.
    pub(super) fn find_writers(&mut self) -> Result<Vec<Box<dyn DirtySource>>, String> {
        let off = || "the guest shut down".to_string();
        let instance = self.instance.as_mut().ok_or_else(off)?;
        let vm = instance.vm().ok_or_else(off)?;
        if vm.is_paused() {
            return Ok(Vec::new());
        }
        let stopped = if instance.leaves_links {
            let (held, stopped) = vm.devices().hold_unlogged()?;
            instance.held = held;
            stopped
        } else {
            Vec::new()
        };
        let vm = self.instance.as_ref().and_then(Instance::vm).ok_or_else(off)?;
        let writers = vm.writers(stopped);
        if writers.is_err() {
            self.restore_links();
        }
        writers
    }

    /// Restores the links that were taken down for the migration, as the VM stays here.
    pub(super) fn restore_links(&mut self) {
        let Some(instance) = &mut self.instance else { return };
        let held = std::mem::take(&mut instance.held);
        if let Some(vm) = instance.vm() {
            vm.devices().let_go(&held);
        }
    }
}
