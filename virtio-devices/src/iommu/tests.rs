mod device;
mod follow;
mod functions;
mod passes;
mod properties;
