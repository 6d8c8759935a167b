package config

import (
	"reflect"
)

// Schema is the JSON Schema of the struct that v points to, ready for
// encoding/json. doc describes a key, given the keys above it; empty: it has
// none.
func Schema(v any, doc func(path ...string) string) map[string]any {
	return schemaOf(reflect.ValueOf(v).Elem(), doc, nil)
}

func schemaOf(v reflect.Value, doc func(...string) string, path []string) map[string]any {
	out := map[string]any{}
	if text := doc(path...); text != "" {
		out["description"] = text
	}
	t := v.Type()
	switch {
	case t.String() == "time.Duration":
		out["type"], out["pattern"] = "string", `^([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$|^0$`
	case t.Kind() == reflect.Struct:
		properties := map[string]any{}
		for _, f := range fieldsOf(v) {
			properties[f.name] = schemaOf(f.value, doc, append(path[:len(path):len(path)], f.name))
		}
		out["type"], out["properties"], out["additionalProperties"] = "object", properties, false
	case t.Kind() == reflect.Slice:
		out["type"], out["items"] = "array", schemaOf(reflect.New(t.Elem()).Elem(), func(more ...string) string {
			if len(more) == len(path) {
				return ""
			}
			return doc(more...)
		}, path)
	case t.Kind() == reflect.Map:
		out["type"], out["additionalProperties"] = "object", map[string]any{"type": "string"}
	case t.Kind() == reflect.Bool:
		out["type"] = "boolean"
	case t.Kind() == reflect.Int:
		out["type"] = "integer"
	default:
		out["type"] = "string"
	}
	return out
}
