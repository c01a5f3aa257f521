//! A device over vhost-user on the worker of its backend.

use std::sync::Arc;

use super::config::DeviceConfig;
use crate::backend::{QueueRunner, RunnerError};
use crate::device::runner::{Progress, RunnerDevice, RunnerWorker};

/// Context of the thread of a device over vhost-user.
pub(crate) struct DeviceWorker {
    /// The worker of its backend.
    pub runner: RunnerWorker,
    /// The device configuration.
    pub config: Arc<DeviceConfig>,
    /// Progress of the driver's queues.
    pub progress: Arc<Progress>,
}

impl DeviceWorker {
    /// Runs until stopped. First waits until its predecessor has ended.
    pub(crate) fn run(self) {
        if let Some(backend) = self.runner.own() {
            self.runner.run(backend, Running { config: &self.config, progress: &self.progress });
        }
    }
}

/// The device during a run of the worker.
struct Running<'w> {
    config: &'w DeviceConfig,
    progress: &'w Progress,
}

impl RunnerDevice for Running<'_> {
    fn progress(&self) -> &Progress {
        self.progress
    }

    fn changed(&self) {
        self.config.changed();
    }

    fn take_config(&self, config: &[u8]) -> bool {
        self.config.take(config)
    }

    fn serve(&mut self, backend: &mut (dyn QueueRunner + 'static)) -> Result<bool, RunnerError> {
        carry_writes(backend, self.config).map(|()| false)
    }
}

/// Forwards the driver's writes to the backend, and reads the resulting configuration back.
///
/// # Errors
///
/// Fails if the backend is lost. The failed write and those behind it wait until it has recovered.
pub(crate) fn carry_writes(backend: &mut dyn QueueRunner, config: &DeviceConfig) -> Result<(), RunnerError> {
    while let Some(write) = config.next_write() {
        backend.write_config(write.0, &write.1)?;
        config.written(&write);
        config.take(backend.config());
    }
    Ok(())
}
