mod device;
mod follow;
mod passes;
mod properties;
