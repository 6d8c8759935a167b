// Package pluginpb is the generated code of plugin.proto, the control half of
// the plugin ABI (docs/extend/abi/plugin-v1.md).
package pluginpb
